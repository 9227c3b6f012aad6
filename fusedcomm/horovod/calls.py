"""What operations do at their turn, as calls of torch.distributed's backends: NCCL for tensors on cuda, gloo for those
on cpu.

A call begins what moves data, at its turn in the order that the ranks agree on, and leaves a bucket. Whoever waits for
the bucket first, writes the results.
"""

import contextlib
import datetime
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch._C._nn import flatten_dense_tensors, unflatten_dense_tensors

from fusedcomm.horovod.checks import Average, Max, Min, Product
from fusedcomm.horovod.order import Request, SmallSum
from fusedcomm.horovod.signature import Signature
from fusedcomm.ranks import torch_groups
from fusedcomm.ranks.own_group import OwnGroup

Tensors = Sequence[torch.Tensor]
Rows = Sequence[Sequence[int]]
_REDUCE_OPS = {Min: dist.ReduceOp.MIN, Max: dist.ReduceOp.MAX, Product: dist.ReduceOp.PRODUCT}


class Members:
    """A process set on one of its ranks."""

    def __init__(self, group: OwnGroup) -> None:
        self.group, self.rank, self.size = group, group.group_rank, group.group_size
        self.device: torch.device | None = None
        """The accelerator of this rank's tensors; None before the first."""
        self.stream: torch.Stream | None = None
        """Where the accelerator does what operations do; None before the first."""
        self._nccl: dict[str, dist.Backend] = {}

    def check(self, device: torch.device) -> None:
        """Raises ValueError that says what to do if tensors on this device cannot travel."""
        if device.type == "cpu":
            return
        if device.type not in torch_groups.BACKENDS:
            raise ValueError(f"a tensor on {device} is not possible: it must be on cpu or cuda")
        if device.type == "cuda" and not dist.is_nccl_available():
            raise ValueError(
                f"a tensor on {device} needs NCCL, and torch {torch.__version__} has none: use a torch with NCCL, or "
                "pass tensor.cpu()"
            )
        if self.device is None:
            self.device = device
        elif self.device != device:
            raise ValueError(
                f"a tensor on {device} is not possible, because others of this rank were on {self.device}: each rank "
                "has one GPU. Call torch.cuda.set_device(hvd.local_rank()) before tensors are made"
            )

    def on_stream(self, kind: str) -> AbstractContextManager[torch.Stream | None]:
        """Context of work for tensors on this kind of device. None on cpu."""
        if kind == "cpu":
            return contextlib.nullcontext()
        if self.stream is None:
            self.device = self.device or torch.device(kind, torch.accelerator.current_device_index())
            self.stream = torch.Stream(self.device)
        return self.stream

    def backend(
        self, device: torch.device, name: str = "operations", timeout: datetime.timedelta | None = None
    ) -> dist.Backend:
        """For an accelerator each name has a communicator of its own: collectives of two names may come in another
        order on each rank. It is made when the first tensor needs it, on every member together.

        timeout: of a collective; None: the group's."""
        if device.type == "cpu":
            return self.group.backends["cpu"]
        if name not in self._nccl:
            self._nccl[name] = torch_groups.own_nccl(
                self.group.store, name, self.rank, self.size, timeout or self.group.timeout, device
            )
        return self._nccl[name]


class Bucket:
    """Operations that are issued together. A call gives each request its outputs; they are written by whoever waits for
    the bucket first."""

    def __init__(self, device: torch.device) -> None:
        self.futures: list[torch.futures.Future] = []
        """Of what is under way; on an accelerator none, once it is enqueued."""
        self._works: list[dist.Work] = []
        self._writes: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._device = device
        self._written: torch.Event | None = None

    def add(self, work: dist.Work) -> None:
        """It is under way."""
        if self._device.type == "cpu":
            self.futures.append(work.get_future())
        else:
            self._works.append(work)

    def write(self, function: Callable[[], None]) -> None:
        """Calls the function when all that is under way has ended."""
        self._writes.append(function)

    def write_all(self) -> None:
        """Writes the results, once. On an accelerator the current stream does, after what is under way."""
        with self._lock, torch.no_grad():
            for work in self._works:
                work.wait()
            for function in self._writes:
                function()
            self._writes.clear()
        if self._device.type != "cpu":
            self._written = torch.Event(self._device)
            self._written.record()

    def finish(self, outputs: Tensors) -> None:
        """Call it when the futures have ended. On an accelerator the current stream waits for these results."""
        if self._writes:
            self.write_all()
        if self._written is None:
            return
        self._written.wait()
        stream = torch.accelerator.current_stream(self._device)
        for output in outputs:
            if output.device == self._device:
                output.record_stream(stream)  # its memory may be of the stream on which calls are made


def neutral(signature: Signature, device: torch.device | None) -> list[torch.Tensor]:
    """Tensors that do not change the others' result, for a rank that has joined. device: an accelerator, if they are to
    be on one."""
    found = []
    for name, shape in signature.tensors:
        dtype, value = getattr(torch, name), 1.0 if signature.op == Product else 0.0
        if signature.op in (Min, Max):
            limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
            value = limits.max if signature.op == Min else limits.min
            if dtype.is_floating_point:
                value = math.copysign(math.inf, value)
        found.append(torch.full(shape, value, dtype=dtype, device="cpu" if signature.device == "cpu" else device))
    return found


# ---- numbers


def multiply(tensor: torch.Tensor, factor: float) -> None:
    """In place. Whole numbers are multiplied in fp64 and truncated, 16-bit floats in fp32: mul_() would round the
    factor to 16 bits."""
    if factor == 1:
        return
    if not tensor.dtype.is_floating_point:
        tensor.copy_(tensor.double().mul_(factor).trunc_())
    elif tensor.dtype.itemsize == 2:
        tensor.copy_(tensor.float().mul_(factor))
    else:
        tensor.mul_(factor)


def scale_sum(tensor: torch.Tensor, signature: Signature, size: int) -> None:
    """Multiplies by postscale, and divides by `size` for a mean."""
    if signature.op != Average:
        multiply(tensor, signature.postscale)
    elif signature.postscale != 1 or not tensor.dtype.is_floating_point:
        multiply(tensor, signature.postscale / size)
    elif size > 1:
        tensor.div_(size)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory: a dimension of size 1 may have any stride, which view() would keep."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its memory as bytes."""
    return flat(tensor).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)


def sum_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which values are summed. On cpu 16-bit floats are summed in fp32."""
    is_widened = tensor.is_cpu and tensor.dtype.is_floating_point and tensor.dtype.itemsize == 2
    return torch.float32 if is_widened else tensor.dtype


# ---- the operations


def allreduce(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """One sum for each dtype."""
    inputs = [each for request in requests for each in request.inputs]
    outputs = [each for request in requests for each in request.outputs]
    bucket = Bucket(inputs[0].device)
    for dtype in dict.fromkeys(each.dtype for each in inputs):
        places = [i for i, each in enumerate(inputs) if each.dtype == dtype]
        alike = [inputs[i] for i in places]
        to = [outputs[i] for i in places]
        buffer = flat(to[0]) if len(alike) == 1 and dtype == sum_dtype(alike[0]) else None
        if buffer is None:
            buffer = flatten_dense_tensors(alike).to(sum_dtype(alike[0]))
        elif to[0].data_ptr() != alike[0].data_ptr():
            buffer.copy_(flat(alike[0]))
        if not buffer.numel():
            continue
        bucket.write(scaled(signature, buffer, to, members.size))
        if members.size > 1:
            op = _REDUCE_OPS.get(signature.op, dist.ReduceOp.SUM)
            bucket.add(members.backend(alike[0].device).allreduce([buffer], op))
    return bucket


def scaled(signature: Signature, buffer: torch.Tensor, outputs: Tensors, size: int) -> Callable[[], None]:
    """Scales what is to be reduced in `buffer`. Returns what makes the outputs of the reduction, whose memory may be
    the buffer's."""
    multiply(buffer, signature.prescale)

    def write() -> None:
        scale_sum(buffer, signature, size)
        if buffer.data_ptr() != outputs[0].data_ptr():
            torch._foreach_copy_(list(outputs), list(unflatten_dense_tensors(buffer, outputs)))

    return write


def small_sum(signature: Signature, inputs: Tensors, outputs: Tensors, size: int) -> SmallSum:
    """The reduction as one that travels with the messages about it. The inputs stay as they are."""
    part = flatten_dense_tensors([each.detach() for each in inputs]).to(sum_dtype(inputs[0]), copy=True)
    return SmallSum(part, scaled(signature, part, outputs, size))


def allgather(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """A backend gathers equal parts: shorter ones are filled up, and cut off again."""
    inputs = requests[0].inputs
    bucket = Bucket(inputs[0].device)
    outputs = requests[0].outputs = []
    for i, given in enumerate(inputs):
        counts = [of_member[i] for of_member in rows]
        most, is_even = max(counts), len(set(counts)) == 1
        taken = given.new_empty((sum(counts), *given.shape[1:]))
        outputs.append(taken)
        if members.size == 1:
            taken.copy_(given)
            continue
        if not taken.numel():
            continue
        gathered, part = taken, given
        if not is_even:
            gathered, part = (given.new_empty((num_rows, *given.shape[1:])) for num_rows in (most * members.size, most))
            part[: given.shape[0]].copy_(given)
        bucket.add(members.backend(given.device)._allgather_base(as_bytes(gathered), as_bytes(part)))

        def write(taken: torch.Tensor = taken, gathered: torch.Tensor = gathered, counts: list[int] = counts) -> None:
            parts = gathered.view(len(counts), -1, *gathered.shape[1:])
            torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)], out=taken)

        if not is_even:
            bucket.write(write)
    return bucket


def broadcast(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """From the root to the outputs."""
    bucket = Bucket(requests[0].inputs[0].device)
    for given, taken in zip(requests[0].inputs, requests[0].outputs, strict=True):
        if members.rank == signature.root and taken.data_ptr() != given.data_ptr():
            taken.copy_(given)
        if members.size > 1 and given.numel():
            options = dist.BroadcastOptions()
            options.rootRank = signature.root
            bucket.add(members.backend(given.device).broadcast([as_bytes(taken)], options))
    return bucket


def alltoall(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """Rows to each member, and from each."""
    (given,) = requests[0].inputs
    bucket = Bucket(given.device)
    sent, received = list(rows[members.rank]), [of_member[members.rank] for of_member in rows]
    taken = given.new_empty((sum(received), *given.shape[1:]))
    row_nbytes = math.prod(given.shape[1:]) * given.element_size()
    if members.size == 1:
        taken.copy_(given)
    elif row_nbytes * sum(map(sum, rows)):
        splits = ([count * row_nbytes for count in counts] for counts in (received, sent))
        bucket.add(members.backend(given.device).alltoall_base(as_bytes(taken), as_bytes(given), *splits))
    requests[0].outputs = [taken, torch.tensor(received, dtype=torch.int32)]
    return bucket


def reducescatter(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """Every member sums the rows that it gets. The first ones get one more if they cannot be divided equally."""
    inputs = requests[0].inputs
    bucket = Bucket(inputs[0].device)
    outputs = requests[0].outputs = []
    for given in inputs:
        each, more = divmod(given.shape[0], members.size)
        counts = [(each + (j < more)) * math.prod(given.shape[1:]) for j in range(members.size)]
        taken = given.new_empty((each + (members.rank < more), *given.shape[1:]))
        outputs.append(taken)
        source = flat(given)
        if signature.prescale != 1:
            multiply(source := source.clone(), signature.prescale)
        parts = source.new_empty((members.size, taken.numel()))
        if members.size == 1:
            parts.copy_(source.view(1, -1))
        elif given.numel():
            nbytes = given.element_size()
            received, sent = [taken.numel() * nbytes] * members.size, [count * nbytes for count in counts]
            backend = members.backend(given.device)
            bucket.add(backend.alltoall_base(as_bytes(parts), as_bytes(source), received, sent))

        def write(parts: torch.Tensor = parts, taken: torch.Tensor = taken) -> None:
            total = parts[0].to(sum_dtype(parts), copy=True)
            for part in parts[1:]:
                total.add_(part)
            scale_sum(total, signature, members.size)
            taken.copy_(total.view(taken.shape))

        bucket.write(write)
    return bucket


def barrier(members: Members, signature: Signature, rows: Rows, requests: list[Request]) -> Bucket:
    """Every member has submitted it: there is nothing to do."""
    return Bucket(torch.device("cpu"))
