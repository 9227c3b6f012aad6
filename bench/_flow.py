"""Measures what a link really carries, with one TCP connection that sends as fast as it can.

receive ADDRESS PORT         accepts one connection, prints {"nbytes": …, "seconds": …}
send ADDRESS PORT SECONDS    connects, and sends for that long
"""

import json
import socket
import sys
import time

BUFFER_NBYTES = 1 << 18
CONNECT_S = 20.0


def receive(address: str, port: int) -> None:
    """Counts bytes and seconds from the arrival of the first bytes to that of the last. The first bytes do not count,
    so that the time to connect is not part of the rate."""
    buffer = bytearray(BUFFER_NBYTES)
    with socket.create_server((address, port)) as server:
        server.settimeout(CONNECT_S)
        connection, _ = server.accept()
        with connection:
            if connection.recv_into(buffer) == 0:
                raise SystemExit("the sender sent nothing")
            begin = end = time.perf_counter()
            nbytes = 0
            while received := connection.recv_into(buffer):
                nbytes += received
                end = time.perf_counter()
    print(json.dumps({"nbytes": nbytes, "seconds": end - begin}))


def send(address: str, port: int, seconds: float) -> None:
    data = bytes(BUFFER_NBYTES)
    give_up = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = socket.create_connection((address, port))
            break
        except ConnectionRefusedError:  # the receiver has not started yet
            if time.monotonic() > give_up:
                raise
            time.sleep(0.05)
    with connection:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            connection.sendall(data)


if __name__ == "__main__":
    what, address, port, *rest = sys.argv[1:]
    if what == "receive":
        receive(address, int(port))
    else:
        send(address, int(port), float(rest[0]))
