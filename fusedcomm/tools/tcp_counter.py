"""Counts the bytes this process really sends over TCP, as the kernel's own socket counters say.

A codec's own arithmetic says what it meant to send. This says what left, for any transport that uses TCP, whoever
opened the sockets.
"""

import os
import socket
import stat
import struct

# struct tcp_info of linux/tcp.h. Payload bytes handed to the network, retransmissions included (Linux 4.19 and later);
# `tcpi_bytes_acked`, at 120, would lag behind by what the peer has not acknowledged yet.
_BYTES_SENT_OFFSET = 200
_BYTES_RETRANSMITTED_OFFSET = 208
_TCP_INFO_NBYTES = 256

_last_seen: dict[int, int] = {}
"""Bytes sent by each TCP socket met so far, by inode: a socket that has been closed since still counts."""


class _KernelTooOld(Exception):
    pass


def tcp_nbytes_sent() -> int | None:
    """Payload bytes this process has sent over TCP sockets, counting each byte once however often it was retransmitted.

    Only differences between two calls mean something: what a socket sent before it closed is known as of the last call.
    None where the kernel does not tell (not Linux, or older than 4.19). Costs some microseconds for each open file.
    """
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return None
    for fd in fds:
        try:
            status = os.fstat(fd)
            if stat.S_ISSOCK(status.st_mode):
                nbytes = _tcp_socket_nbytes_sent(fd)
                if nbytes is not None:
                    _last_seen[status.st_ino] = nbytes
        except _KernelTooOld:
            return None
        except OSError:
            continue  # closed since it was listed
    return sum(_last_seen.values())


def _tcp_socket_nbytes_sent(fd: int) -> int | None:
    """None if the socket is not a TCP socket."""
    # A socket object closes its descriptor: give it one of its own.
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
    if len(info) < _BYTES_RETRANSMITTED_OFFSET + 8:
        raise _KernelTooOld
    (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)
    (retransmitted,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED_OFFSET)
    return sent - retransmitted
