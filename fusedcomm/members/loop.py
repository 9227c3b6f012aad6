"""A daemon thread that serves non-blocking connections and timers, and the connections it serves."""

import collections
import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from . import frames
from .errors import FrameError

# Seconds between two looks at the timers.
_TICK_S = 0.1
# Seconds beyond a tick after which this process counts as having stood still.
_STOOD_STILL_S = 0.5
# Bytes that may wait to be sent to one process. A member that reads nothing for so long is silent anyway.
_MAX_UNSENT_NBYTES = 16 << 20


class Loop:
    """Calls functions on one daemon thread: of connections that are ready, of other threads, and each tick.

    on_tick(now): called about ten times a second. on_stood_still(seconds): called before any timer is looked at if this
    process has not run for that long, and after everything that has arrived meanwhile was read. on_error(error): a call
    has raised, and the thread ends.
    """

    def __init__(
        self,
        on_tick: Callable[[float], None],
        on_stood_still: Callable[[float], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._on_tick, self._on_stood_still, self._on_error = on_tick, on_stood_still, on_error
        self._selector = selectors.DefaultSelector()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._wake_in, self._wake_out = socket.socketpair()
        for end in (self._wake_in, self._wake_out):
            end.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._drain)
        self._is_stopped, self._ticked = False, time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fc-members-control", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def stood_s(self) -> float:
        """Seconds since the last tick."""
        return time.monotonic() - self._ticked

    def call(self, function: Callable[[], None]) -> None:
        """Has the loop call the function soon. Any thread may call this; calls keep their order."""
        self._calls.append(function)
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: it has ended
            self._wake_in.send(b"w")

    def call_and_wait(self, function: Callable[[], None]) -> None:
        """call(), for another thread that needs its effect. Returns without it if the loop has ended."""
        done = threading.Event()
        self.call(function)
        self.call(done.set)
        while not done.wait(0.1) and self._thread.is_alive():
            pass

    def watch(self, connection: socket.socket, events: int, on_ready: Callable[[int], None]) -> None:
        """Calls on_ready(events) when one of the events of `selectors` has occurred; replaces an earlier watch."""
        try:
            self._selector.modify(connection, events, on_ready)
        except KeyError:
            self._selector.register(connection, events, on_ready)

    def forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)

    def stop(self) -> None:
        """Ends the thread, and waits for it unless it is the caller."""
        self._is_stopped = True
        self.call(lambda: None)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(10)

    def close_in_child(self) -> None:
        """Closes all connections, and the port, in a forked child, which has no loop. They are not taken from the
        selector, because it is the parent's, too."""
        self._is_stopped = True
        for key in list((self._selector.get_map() or {}).values()):  # None: the loop has ended before
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()
        self._wake_in.close()

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_out.recv(4096):
                pass

    def _run(self) -> None:
        try:
            self._serve_until_stopped()
        except Exception as error:
            if not self._is_stopped:
                self._is_stopped = True
                self._on_error(error)
        finally:
            self._selector.close()
            self._wake_in.close()
            self._wake_out.close()

    def _serve_until_stopped(self) -> None:
        owner = os.getpid()
        self._ticked = time.monotonic()
        while not self._is_stopped and os.getpid() == owner:
            ready = self._selector.select(_TICK_S)
            while ready:  # all that has arrived comes before any timer
                self._serve(ready)
                if self.stood_s > _TICK_S:
                    break
                ready = self._selector.select(0)
            self._run_calls()
            now = time.monotonic()
            stood_s = now - self._ticked
            if stood_s < _TICK_S:
                continue
            if stood_s > _TICK_S + _STOOD_STILL_S:
                self._read_all()
                self._on_stood_still(stood_s)
            self._ticked = now
            self._on_tick(now)
        self._run_calls()

    def _read_all(self) -> None:
        for _ in range(100):
            ready = self._selector.select(0)
            if not ready:
                return
            self._serve(ready)

    def _serve(self, ready: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, events in ready:
            current = self._selector.get_map().get(key.fd)
            if current is not None and current.fileobj is key.fileobj:  # else an earlier one has closed it
                current.data(events)
        self._run_calls()

    def _run_calls(self) -> None:
        while self._calls:
            self._calls.popleft()()


class Channel:
    """A non-blocking connection that carries frames without payloads. Only the loop's thread uses it.

    on_frame(kind, header) and on_end(reason) may be replaced at any time. on_end is called once, and not after close().
    """

    def __init__(self, loop: Loop, connection: socket.socket) -> None:
        self._loop, self.connection = loop, connection
        self.on_frame: Callable[[int, dict], None] = lambda kind, header: None
        self.on_end: Callable[[str], None] = lambda reason: None
        self.is_open = True
        self._decoder = frames.Decoder()
        self._unsent = bytearray()
        self._closes_when_sent = False
        connection.setblocking(False)
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        loop.watch(connection, selectors.EVENT_READ, self._ready)

    def send(self, kind: int, header: dict) -> None:
        """Sends what the system takes at once, the rest later. Does nothing after the end."""
        if not self.is_open or self._closes_when_sent:
            return
        self._unsent += frames.encode(kind, header)
        if len(self._unsent) > _MAX_UNSENT_NBYTES:
            self._end(f"it has read nothing for {len(self._unsent)} bytes")
            return
        self._flush()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.forget(self.connection)
            self.connection.close()

    def close_when_sent(self) -> None:
        """Closes once everything is handed to the system. Nothing that arrives is read any more."""
        self._closes_when_sent = True
        self.on_frame, self.on_end = lambda kind, header: None, lambda reason: None
        self._flush()

    def detach(self) -> socket.socket | None:
        """The connection, blocking, for another thread to use. None, and closed, if bytes wait on either way."""
        if not self.is_open or self._unsent or not self._decoder.is_empty:
            self.close()
            return None
        self.is_open = False
        self._loop.forget(self.connection)
        self.connection.setblocking(True)
        return self.connection

    def _ready(self, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush()
        if self.is_open and events & selectors.EVENT_READ:
            self._read()

    def _read(self) -> None:
        try:
            piece = self.connection.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(str(error))
            return
        if not piece:
            self._end("its connection has ended")
            return
        try:
            found = self._decoder.feed(piece)
        except FrameError as error:
            self._end(str(error))
            return
        for kind, header in found:
            if self.is_open:
                self.on_frame(kind, header)

    def _flush(self) -> None:
        if not self.is_open:
            return
        try:
            while self._unsent:
                sent = self.connection.send(self._unsent)
                del self._unsent[:sent]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self._end(str(error))
            return
        if self._closes_when_sent and not self._unsent:
            self.close()
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._loop.watch(self.connection, wanted, self._ready)

    def _end(self, reason: str) -> None:
        if self.is_open:
            self.close()
            self.on_end(reason)


class Dial:
    """An attempt to connect. Calls on_connected(channel), or on_failed(was_refused, reason), on the loop's thread.

    was_refused: nobody listens at that port, though the host answers.
    """

    def __init__(
        self,
        loop: Loop,
        host: str,
        port: int,
        on_connected: Callable[[Channel], None],
        on_failed: Callable[[bool, str], None],
    ) -> None:
        self._loop, self._on_connected, self._on_failed = loop, on_connected, on_failed
        self._connection: socket.socket | None = None
        self.is_open = True
        try:
            self._connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
            self._connection.setblocking(False)
            self._connection.connect((host, port))
        except BlockingIOError:
            pass
        except OSError as error:
            # Reported later: the caller has not stored this object yet.
            refused, text = isinstance(error, ConnectionRefusedError), str(error)
            loop.call(lambda: self._fail(refused, text))
            return
        assert self._connection is not None
        loop.watch(self._connection, selectors.EVENT_WRITE, self._ready)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            if self._connection is not None:
                self._loop.forget(self._connection)
                self._connection.close()

    def _ready(self, _: int) -> None:
        connection = self._connection
        assert connection is not None
        try:
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise OSError(code, os.strerror(code))  # of the class that belongs to the code
            met_itself = connection.getsockname() == connection.getpeername()
        except OSError as error:  # also if the other end has closed it already
            self._fail(isinstance(error, ConnectionRefusedError), str(error))
            return
        if met_itself:
            # A port of this host that nobody listens to was dialed, and the system chose it for this end, too.
            self._fail(True, "nobody listens: the connection met itself")
            return
        self.is_open = False
        self._loop.forget(connection)
        self._on_connected(Channel(self._loop, connection))

    def _fail(self, was_refused: bool, reason: str) -> None:
        if self.is_open:
            self.close()
            self._on_failed(was_refused, reason)
