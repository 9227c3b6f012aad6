"""Counts the bytes that this process sends over TCP, by the kernel's socket counters.

A codec can only compute how many bytes it means to send. These counters show what was sent, by any transport that uses
TCP, whichever library opened the sockets.
"""

import os
import socket
import stat
import struct

# Offsets in bytes into struct tcp_info of linux/tcp.h. The first counts payload bytes handed to the network,
# retransmissions included (Linux 4.19 and later). `tcpi_bytes_acked`, at 120, would lag behind by the bytes that the
# peer has not acknowledged yet.
_BYTES_SENT_OFFSET = 200
_BYTES_RETRANSMITTED_OFFSET = 208
_TCP_INFO_NBYTES = 256

_last_seen: dict[int, int] = {}
"""Bytes sent by each TCP socket seen so far, by inode. A socket that has since closed still counts."""


class _KernelTooOld(Exception):
    """The kernel does not count the bytes that a socket sends."""

    pass


def tcp_nbytes_sent() -> int | None:
    """Payload bytes that this process has sent over TCP. A byte counts once, however often it was retransmitted.

    None where the kernel does not count (not Linux, or older than 4.19). Use only the difference between two calls; it
    lacks what a socket sent after the last call that saw it open. Costs some microseconds for each open file.
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
    """Payload bytes that the socket `fd` has sent, without retransmissions; None if it is not a TCP socket."""
    # The socket object closes its descriptor, so it gets a duplicate.
    with socket.socket(fileno=os.dup(fd)) as sock:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return None
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
    if len(info) < _BYTES_RETRANSMITTED_OFFSET + 8:
        raise _KernelTooOld
    (sent,) = struct.unpack_from("=Q", info, _BYTES_SENT_OFFSET)
    (retransmitted,) = struct.unpack_from("=Q", info, _BYTES_RETRANSMITTED_OFFSET)
    return sent - retransmitted
