"""The order in which this rank issues its operations: the one that rank 0 decides (negotiator.py), whatever order its
callers submit them in.

    submit() ──► READY ──► rank 0 ──► EXECUTE ──► every member issues the bucket

Messages go over a gloo group of their own. On rank 0 a thread for each other rank waits for that one's messages, on the
others a thread waits for rank 0's; who submits an operation and waits for it sends by itself. Operations that nobody
waits for yet are sent together, by one more thread, within a moment. All of them sleep while nothing is under way.
"""

import contextlib
import datetime
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.horovod.errors import HorovodInternalError
from fusedcomm.horovod.negotiator import Negotiator
from fusedcomm.horovod.signature import (
    BYE,
    END,
    EXECUTE,
    LEAVING,
    NEWS,
    READY,
    Entry,
    Response,
    Signature,
    decoded,
    encoded,
)

BATCH_S = 5e-4
"""Seconds in which submitted operations are gathered for one message, unless somebody waits for one of them."""
GRACE_S = 5.0
"""Seconds after a failure in which what is under way may still end, and rank 0 has to answer a shutdown()."""
EXPLANATION_S = 3.0
"""Seconds that an operation which has failed waits for rank 0's word about who is lost."""
SLICE_S = 1.0
"""A wait looks this often, in seconds, whether the job has failed meanwhile."""
PART_NBYTES = 1 << 16
"""A message that is longer comes in parts of this size."""
MAX_SENT = 256
"""Messages that may be on their way: each is kept until it has left."""
_LENGTH = struct.Struct("<I")
_TAG = 1
_FOREVER = datetime.timedelta(days=365)
_GONE = "ended its connection: its process has ended, or its host cannot be reached"


class Request:
    """An operation that this rank has submitted, or takes part in without (after a join).

    `event`: behind what the caller has enqueued for its tensors; None on the CPU. `issued`: a lock that is free once
    `bucket`, or `error`, is set.
    """

    __slots__ = ("bucket", "entry", "error", "event", "index", "inputs", "is_issued", "issued", "key", "number",
                 "outputs", "set_id", "submitted_s")  # fmt: skip

    def __init__(
        self, set_id: int, entry: Entry, inputs: Sequence[torch.Tensor] = (), outputs: Sequence[torch.Tensor] = ()
    ) -> None:
        self.set_id, self.entry, self.inputs, self.outputs = set_id, entry, inputs, outputs
        self.key = entry.signature.key
        self.event: torch.Event | None = None
        self.error, self.number, self.index, self.is_issued = "", 0, 0, False
        self.bucket: Any = None
        self.issued = threading.Lock()
        self.issued.acquire()
        self.submitted_s = time.perf_counter()

    @property
    def results(self) -> list[torch.Tensor]:
        """What the operation has made, once it is finished."""
        return self.bucket.outputs[self.index]


Start = Callable[[int, Sequence[Response], list[Request]], Any]
"""Begins a bucket of a set on this rank: (set, responses, requests) -> a calls.Bucket."""


class Order:
    """Every rank of the job makes one.

    Args:
        control: a gloo backend over the ranks that nothing else uses; None with one rank.
        negotiator: on rank 0.
        start: is called on one thread at a time, in the same order on all members of a set.
    """

    def __init__(
        self, rank: int, size: int, control: dist.Backend | None, negotiator: Negotiator | None, start: Start
    ) -> None:
        self._rank, self._size, self._control, self._start = rank, size, control, start
        self._negotiator = negotiator
        self.failure = ""
        self._failed_at, self._has_failed, self._is_leaving = 0.0, threading.Event(), False
        self._lock = threading.Lock()  # guards the requests and the queue
        self._requests: dict[tuple[int, str], Request] = {}
        self._queue: list[Request] = []
        self._ids: dict[tuple[int, Signature], int] = {}
        self._signatures: dict[int, Signature] = {}
        self._under_way: dict[int, deque[Any]] = {}  # buckets by set
        self._turn = threading.RLock()  # on rank 0: held to decide what is next, and to issue it
        self._send_lock = threading.Lock()
        self._sent: deque[dist.Work] = deque()
        self.on_issued: Callable[[list[Request]], None] | None = None
        """For the timeline."""
        self._bell = threading.Event()
        self._is_watching = False
        peers = [] if size == 1 else [0] if rank else range(1, size)
        self._threads = [threading.Thread(target=self._receive, args=(peer,), daemon=True) for peer in peers]
        self._batcher = threading.Thread(target=self._batch, name="fc-order", daemon=True)
        for each in (*self._threads, self._batcher):
            each.start()

    # ---- calls

    def submit(self, request: Request, at_once: bool) -> None:
        """at_once: the caller is about to wait for it. Raises ValueError if an operation of its name is under way,
        RuntimeError after a failure."""
        for tensor in request.inputs:
            if not tensor.is_cpu:
                request.event = torch.Event(tensor.device)
                request.event.record()
                break
        with self._lock:
            if self.failure:
                raise RuntimeError(self.failure)
            place = request.set_id, request.key
            if place in self._requests:
                raise ValueError(
                    f"fusedcomm: {request.key} is under way on rank {self._rank}, so it cannot be submitted again: "
                    "synchronize its handle first, or use another name"
                )
            self._requests[place] = request
            self._queue.append(request)
            is_first = len(self._queue) == 1
        if at_once or self._size == 1:
            self._flush()
        elif is_first:
            self._bell.set()

    def poll(self, request: Request) -> bool:
        """Whether wait() would return at once."""
        if self._queue and not request.is_issued:
            self._flush()
        if request.issued.locked():
            return False
        bucket = request.bucket
        return bucket is None or bucket.is_done() or self._has_given_up()

    def wait(self, request: Request) -> None:
        """Returns when the request's outputs are written. Raises HorovodInternalError."""
        if self._queue and not request.is_issued:
            self._flush()
        with request.issued:
            pass
        if request.error:
            raise HorovodInternalError(request.error)
        bucket = request.bucket
        if bucket is None:
            return
        with bucket.lock:
            if bucket.error is None:
                bucket.error = self._end_of(bucket, request.key)
        self._forget_done(request.set_id)
        if bucket.error:
            raise HorovodInternalError(bucket.error)
        bucket.follow()

    def _end_of(self, bucket: Any, key: str) -> str:
        """Waits for a bucket, and writes its results. Returns its error, for people; empty: none."""
        try:
            while not bucket.has_ended_within(SLICE_S):
                if self._has_given_up():
                    return self.failure
            bucket.finish()
            return ""
        except Exception as error:
            return self._explained(key, error)

    def _explained(self, key: str, error: Exception) -> str:
        # A backend says that a connection has ended, but not whose. Rank 0 will know.
        self._has_failed.wait(EXPLANATION_S)
        text = f"fusedcomm: {key} failed on rank {self._rank}: {error}"
        text = f"{self.failure} ({text})" if self.failure else text
        self.leave(text)  # the other ranks wait for this one
        return text

    def _has_given_up(self) -> bool:
        return bool(self.failure) and time.monotonic() > self._failed_at + GRACE_S

    def leave(self, why: str) -> None:
        """Ends the operations of every rank."""
        if self._rank == 0:
            self._end(why)
        elif not self.failure:
            self._send(0, encoded(LEAVING, 0, news=why))

    def shutdown(self) -> bool:
        """Every rank's requests fail from then on. Returns whether all that was under way has ended. Idempotent."""
        if not self._is_leaving:
            self._is_leaving = True
            self.leave(f"fusedcomm: rank {self._rank} called shutdown(), which ends it on every rank")
        deadline = time.monotonic() + GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._fail(f"fusedcomm: rank {self._rank} called shutdown(), and rank 0 does not answer")
        self._bell.set()
        self._batcher.join()
        left = [bucket for buckets in self._under_way.values() for bucket in buckets]
        with contextlib.suppress(RuntimeError):
            return all(bucket.has_ended_within(max(0.0, deadline - time.monotonic())) for bucket in left)
        return not any(thread.is_alive() for thread in self._threads)

    # ---- messages

    def _flush(self) -> None:
        """Tells rank 0 what has been submitted since the last call."""
        if self._negotiator is None:
            by_set: dict[int, tuple[list[int], list[Entry]]] = {}
            with self._send_lock:  # messages in the order of the queue
                queue = self._taken()
                for request in queue:
                    numbers, news = by_set.setdefault(request.set_id, ([], []))
                    entry = request.entry
                    known = None
                    if not entry.rows and not entry.problem:
                        known = self._ids.get((request.set_id, entry.signature))
                    numbers.append(NEWS if known is None else known)
                    if known is None:
                        news.append(entry)
                for set_id, (numbers, news) in by_set.items():
                    self._send_now(0, encoded(READY, set_id, numbers, news or None))
            return
        with self._turn:
            for request in self._taken():
                self._negotiator.add(request.set_id, 0, request.entry)
            self._emit()

    def _taken(self) -> list[Request]:
        with self._lock:
            queue, self._queue = self._queue, []
        return queue

    def _batch(self) -> None:
        """The thread that sends what nobody waits for, and on rank 0 looks for stalls."""
        while not self.failure:
            self._bell.wait(self._next_look_s())
            self._bell.clear()
            if self._queue:
                time.sleep(BATCH_S)
            if self._queue or self._negotiator is not None:
                self._flush()
            if self._negotiator is not None:
                with self._turn:
                    why = self._negotiator.look_for_stalls()
                if why:
                    self._end(why)

    def _next_look_s(self) -> float | None:
        if self._negotiator is None:
            return None
        with self._turn:
            next_s = self._negotiator.next_look_s()
            self._is_watching = next_s is not None
        return next_s

    def _send(self, peer: int, message: bytes) -> None:
        with self._send_lock:
            self._send_now(peer, message)

    def _send_now(self, peer: int, message: bytes) -> None:
        data = bytearray(_LENGTH.pack(len(message)) + message)
        with contextlib.suppress(RuntimeError):  # the peer is lost, which its receiver tells
            for begin in range(0, len(data), PART_NBYTES):
                part = torch.frombuffer(
                    data, dtype=torch.uint8, offset=begin, count=min(PART_NBYTES, len(data) - begin)
                )
                self._sent.append(self._control.send([part], peer, _TAG))
            while len(self._sent) > MAX_SENT:
                self._sent.popleft().wait(_FOREVER)

    def _receive(self, peer: int) -> None:
        """The thread that waits for a peer's messages."""
        buffers = [bytearray(PART_NBYTES) for _ in range(2)]
        tensors = [torch.frombuffer(each, dtype=torch.uint8) for each in buffers]
        data, has_ended, turn = bytearray(), False, 0
        try:
            receiving = self._control.recv([tensors[0]], peer, _TAG)
            while not has_ended:
                receiving.wait(_FOREVER)
                # The next message finds its buffer while this one is read.
                receiving, received = self._control.recv([tensors[1 - turn]], peer, _TAG), buffers[turn]
                turn = 1 - turn
                if not data:
                    (nbytes,) = _LENGTH.unpack_from(received)
                    nbytes += _LENGTH.size
                data += received[: min(nbytes - len(data), PART_NBYTES)]
                if len(data) == nbytes:
                    has_ended = self._on_message(peer, bytes(data[_LENGTH.size :]))
                    data.clear()
        except RuntimeError:  # gloo's
            why = f"fusedcomm: rank {peer} {_GONE}"
            self._end(why) if self._rank == 0 else self._fail(why)

    def _on_message(self, peer: int, message: bytes) -> bool:
        """Whether it is the last one of this peer."""
        kind, set_id, numbers, news = decoded(message)
        if kind == EXECUTE:
            self._issue(set_id, self._buckets(set_id, numbers, news))
        elif kind == READY:
            left = iter(news or ())
            with self._turn:
                for number in numbers:
                    self._negotiator.add(set_id, peer, self._entry(number, left))
                self._emit()
        elif kind == LEAVING:
            self._end(news)
        elif kind == END:
            self._fail(news)
            self._send(0, encoded(BYE, 0))
            with contextlib.suppress(RuntimeError):
                self._sent[-1].wait(datetime.timedelta(seconds=GRACE_S))
        return kind in (END, BYE)

    def _entry(self, number: int, news: Any) -> Entry:
        if number != NEWS:
            return Entry(self._signatures[number])
        fields, rows, problem = next(news)
        return Entry(Signature.read(fields), tuple(rows), problem)

    def _buckets(self, set_id: int, numbers: Sequence[int], news: list | None) -> list[list[Response]]:
        """What _emit() has written."""
        found, left, numbers = [], iter(news or ()), iter(numbers)
        for count in numbers:
            bucket = []
            for _ in range(count):
                number = next(numbers)
                if number != NEWS:
                    bucket.append(Response(number, False, self._signatures[number]))
                    continue
                known, is_new, fields, rows, error, last = next(left)
                bucket.append(Response(known, is_new, Signature.read(fields), tuple(map(tuple, rows)), error, last))
            found.append(bucket)
        return found

    def _emit(self) -> None:
        """Sends what is due, and issues it here. On rank 0, with its turn."""
        if self.failure:
            return
        for set_id, ranks, nbytes in list(self._negotiator.due()):
            if nbytes < self._negotiator.fusion_nbytes and self._is_busy(set_id):
                continue
            buckets, numbers, news = self._negotiator.take(set_id), [], []
            for bucket in buckets:
                numbers.append(len(bucket))
                for response in bucket:
                    is_known = response.id is not None and not response.is_new
                    numbers.append(response.id if is_known else NEWS)
                    if not is_known:
                        news.append(response)
            message = encoded(EXECUTE, set_id, numbers, news or None)
            for rank in ranks:
                if rank != 0:
                    self._send(rank, message)
            if 0 in ranks:
                self._issue(set_id, buckets)
            else:
                self._learn(set_id, buckets)
        if not self._is_watching and self._negotiator.next_look_s() is not None:
            self._is_watching = True
            self._bell.set()

    def _is_busy(self, set_id: int) -> bool:
        """Whether buckets of the set are under way here: what becomes ready then travels together, after them."""
        buckets = self._forget_done(set_id)
        if buckets:
            buckets[-1].then(self._bell.set)
        return bool(buckets)

    # ---- issuing

    def _learn(self, set_id: int, buckets: list[list[Response]]) -> None:
        for bucket in buckets:
            for response in bucket:
                if response.is_new and response.id is not None:
                    self._signatures[response.id] = response.signature
                    self._ids[set_id, response.signature] = response.id

    def _issue(self, set_id: int, buckets: list[list[Response]]) -> None:
        self._learn(set_id, buckets)
        for responses in buckets:
            requests = self._requests_of(set_id, responses)
            if not requests:
                continue
            error, bucket = responses[0].error, None
            if not error and responses[0].signature.kind not in ("barrier", "join"):
                try:
                    bucket = self._start(set_id, responses, requests)
                except Exception as failure:
                    error = f"fusedcomm: {requests[0].key} failed on rank {self._rank}: {failure}"
                    self.leave(error)
            if bucket is not None:
                self._forget_done(set_id).append(bucket)
            for index, request in enumerate(requests):
                request.bucket, request.error, request.number = bucket, error, responses[0].number
                request.index = index
                request.issued.release()
            if self.on_issued is not None:
                self.on_issued(requests)

    def _forget_done(self, set_id: int) -> deque[Any]:
        """The set's buckets that are under way."""
        with self._lock:
            found = self._under_way.setdefault(set_id, deque())
            while found and found[0].is_done():
                found.popleft()
        return found

    def _requests_of(self, set_id: int, responses: list[Response]) -> list[Request]:
        requests = []
        with self._lock:
            for response in responses:
                request = self._requests.pop((set_id, response.signature.key), None)
                if request is None:
                    if response.error:
                        continue
                    request = Request(set_id, Entry(response.signature))  # this rank has joined
                request.is_issued = True
                requests.append(request)
        return requests

    # ---- ends

    def _end(self, why: str) -> None:
        """On rank 0: tells every rank, and sends nothing more."""
        with self._turn:
            if self.failure:
                return
            for rank in range(1, self._size):
                self._send(rank, encoded(END, 0, news=why))
            self._fail(why)

    def _fail(self, why: str) -> None:
        with self._lock:
            if self.failure:
                return
            self._failed_at, self.failure = time.monotonic(), why
            waiting = list(self._requests.values())
            self._requests.clear()
            self._queue.clear()
        for request in waiting:
            request.error = why
            request.issued.release()
        self._has_failed.set()
        self._bell.set()
