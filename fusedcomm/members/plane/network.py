"""The control thread: an event loop with its connections, its tasks, and a tick."""

import asyncio
import concurrent.futures
import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fusedcomm.members.errors import FrameError
from fusedcomm.members.plane import frames
from fusedcomm.ranks.errand import Errand

T = TypeVar("T")

# Seconds between two looks at the timers.
_TICK_S = 0.1
# Seconds beyond a tick after which this process counts as having stood still.
_STOOD_STILL_S = 0.5
# Turns of the loop within which all is read that has arrived while this process stood still.
_CATCH_UP_TURNS = 100
# Bytes that may wait to be sent to one process. A member that reads nothing for so long is silent anyway.
_MAX_UNSENT_NBYTES = 16 << 20
# Bytes that an asker reads ahead of a payload.
_READ_AHEAD_NBYTES = 1 << 20


class Connection:
    """A TCP connection that carries frames. Only its loop's thread uses it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        _CONNECTIONS.add(self)

    def send(self, kind: int, header: dict) -> None:
        """Hands over a frame, which the loop sends. Does nothing after the end."""
        if not self._writer.is_closing():
            self._writer.write(frames.encode(kind, header))
            if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_NBYTES:
                self.abort()

    async def send_all(self, kind: int, header: dict, payload: Sequence[frames.Buffer] = ()) -> None:
        """See :func:`frames.send`."""
        await frames.send(self._writer, kind, header, payload)

    async def receive(
        self, into: memoryview | None = None, max_payload_nbytes: int = 0
    ) -> tuple[int, dict, memoryview]:
        """See :func:`frames.receive`."""
        return await frames.receive(self._reader, into, max_payload_nbytes)

    def close(self) -> None:
        """Ends it once everything is sent."""
        self._writer.close()

    def abort(self) -> None:
        """Ends it now, also for whoever receives from it."""
        self._writer.transport.abort()

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing() and not self._reader.at_eof()

    @property
    def fileno(self) -> int:
        """-1 after the end."""
        return self._writer.get_extra_info("socket").fileno()

    @property
    def met_itself(self) -> bool:
        """Whether a port of this host that nobody listens to was dialed, and the system chose it for this end, too."""
        return self._writer.get_extra_info("sockname") == self._writer.get_extra_info("peername")

    @property
    def peer(self) -> str:
        """host:port of the other end, for people."""
        host, port, *_ = self._writer.get_extra_info("peername") or ("a process", 0)
        return f"{host}:{port}"


_CONNECTIONS: "weakref.WeakSet[Connection]" = weakref.WeakSet()
"""All connections of this process, open or not."""


async def connect(host: str, port: int) -> Connection:
    """Raises ConnectionRefusedError if nobody listens there though the host answers, else OSError."""
    made = Connection(*await asyncio.open_connection(host, port, limit=_READ_AHEAD_NBYTES))
    if made.met_itself:
        made.abort()
        raise ConnectionRefusedError("nobody listens: the connection met itself")
    return made


async def say_hello(host: str, port: int, hello: dict, seconds: float) -> tuple[Connection, dict]:
    """Connects, and says who asks: (the connection, the reply).

    Raises ConnectionRefusedError if nobody listens there; OSError, EOFError, FrameError or asyncio.TimeoutError if no
    reply arrives within the time.
    """

    async def ask() -> tuple[Connection, dict]:
        connection = await connect(host, port)
        try:
            connection.send(frames.HELLO, hello)
            kind, reply, _ = await connection.receive()
            if kind != frames.REPLY:
                raise FrameError(f"fusedcomm: a frame of kind {kind} came where a reply was expected")
        except BaseException:
            connection.abort()
            raise
        return connection, reply

    return await asyncio.wait_for(ask(), seconds)


class Network:
    """Runs coroutines, and functions of other threads, on one daemon thread.

    on_connection(connection): a process has connected. on_tick(now): called about ten times a second.
    on_stood_still(seconds): called before a tick if this process has not run for that long, and after what has arrived
    meanwhile was read. on_error(error): a task or a call has raised.
    """

    def __init__(
        self,
        listening: socket.socket,
        on_connection: Callable[[Connection], Coroutine[Any, Any, None]],
        on_tick: Callable[[float], None],
        on_stood_still: Callable[[float], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._listening, self._on_connection, self._on_error = listening, on_connection, on_error
        self._on_tick, self._on_stood_still = on_tick, on_stood_still
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        self._is_stopped = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._ticked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="fc-members-control", daemon=True)

    # ---- any thread's

    def start(self) -> None:
        self._thread.start()

    @property
    def stood_s(self) -> float:
        """Seconds since the last tick."""
        return time.monotonic() - self._ticked

    def call(self, function: Callable[[], object]) -> None:
        """Has the thread call the function soon; calls keep their order. Does nothing after the end."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def call_and_wait(self, function: Callable[[], object]) -> None:
        """call(), for another thread that needs its effect. Returns without it if the thread has ended."""

        async def run() -> None:
            function()

        with contextlib.suppress(concurrent.futures.CancelledError):
            self.result(run)

    def result(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the coroutine returns or raises, for another thread. Raises CancelledError of concurrent.futures if the
        thread ends before."""
        coroutine = make()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed
            coroutine.close()
            raise concurrent.futures.CancelledError from None
        try:
            while not future.done() and self._thread.is_alive():
                concurrent.futures.wait([future], 0.5)
        finally:
            future.cancel()  # does nothing if there is a result
        return future.result()

    def stop(self) -> None:
        """Ends the thread, and waits for it unless it is the caller."""
        self.call(self._is_stopped.set)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(10)

    def cut_off_in_child(self) -> None:
        """In a forked child, which has no such thread: puts /dev/null in the place of the port and of connections, so
        that the others notice when the parent ends."""
        null = os.open(os.devnull, os.O_RDWR)
        for fileno in [self._listening.fileno(), *(connection.fileno for connection in _CONNECTIONS)]:
            if fileno >= 0:
                os.dup2(null, fileno, inheritable=False)
        os.close(null)

    # ---- its own thread's

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task:
        """Runs the coroutine; it is cancelled at the end."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def on_thread(self, function: Callable[[], T]) -> T:
        """What the function returns or raises. It has a thread of its own: a slow one silences nobody."""
        return await asyncio.wrap_future(Errand(function).future)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except Exception as error:
            self._on_error(error)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accepted, sock=self._listening)
        self.spawn(self._tick())
        await self._is_stopped.wait()
        server.close()
        await asyncio.sleep(0)  # what was handed over goes to the system
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # connections close

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.spawn(self._on_connection(Connection(reader, writer)))

    async def _tick(self) -> None:
        self._ticked = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            stood_s = self.stood_s
            if stood_s > _TICK_S + _STOOD_STILL_S:
                for _ in range(_CATCH_UP_TURNS):
                    await asyncio.sleep(0)
                self._on_stood_still(stood_s)
            self._ticked = time.monotonic()
            self._on_tick(self._ticked)

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._on_error(error)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, OSError):  # as where there is no descriptor left to accept
            self._on_error(error)
