"""``fusedcomm.simulate``: the mean that many ranks would get, computed in one process with the codec of real ranks."""

import dataclasses
import math
from collections.abc import Sequence

import torch

from fusedcomm import chunks
from fusedcomm.autotune.auto import chosen
from fusedcomm.config import (
    ONE_DIMENSIONAL,
    Config,
    Feedback,
    Wire,
    choose_codec_threads,
    choose_isa,
    combinations,
)
from fusedcomm.native import _C
from fusedcomm.ranks import hosts
from fusedcomm.ranks.hosts import Hosts

# Gradients are processed in pieces, to bound memory. Results do not depend on the cuts, which fall between blocks.
# Bytes of all ranks' encodings of one piece, which are held at once, where the codec sums.
_PIECES_NBYTES = 64 << 20
# Elements of one piece, where the transport adds.
_MAX_PIECE_NUMEL = 1 << 20
# Bytes of a chunk that no piece exceeds.
_ONE_CHUNK = 1 << 62


def simulate(
    grads: Sequence[torch.Tensor],
    config: Config | Wire | None = None,
    *,
    exempt_mask: torch.Tensor | None = None,
    residuals: "Residuals | None" = None,
    weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Returns the mean that every rank would get if `grads` were the gradients of one bucket, one tensor for each rank.

    Use it to see what a wire does to your gradients, or to train as many ranks would without starting them. Beside
    `grads` and the result it needs at most about 128 MiB, or one block for each rank if that is more.

    Args:
        grads: one tensor for each rank, in rank order: fp32, bf16 or fp16, on cpu, all of one shape and dtype. They are
            not changed.
        config: a wire's name or a :class:`fusedcomm.Config`; see :func:`fusedcomm.autotune.auto.chosen`. sum="auto"
            chooses the sum as the engine does for a bucket of this size on this number of ranks. fp32 gradients of at
            most 16 KiB are then summed exactly, whatever the wire: use sum="two-shot" or "one-shot" to see the wire's
            effect. Every element is sent in `config.wire`; `config.wires` is not used, because it selects parameters.
            hosts="auto" is one level here, where all ranks are on one host; ``hosts=8`` simulates hosts of eight ranks.
            Chunks and checks do not change the result.
        exempt_mask: bool tensor in the gradients' shape: True where an element is sent in fp32. None: nowhere. (On
            wires with scales, attach() exempts biases and norms.)
        residuals: error feedback: the residuals of earlier steps are added to the gradients, and replaced by the
            residuals of this step. None: there is no other step, and `config.feedback` has no effect.
        weights: one number for each rank, 0 or more: the handle's `weight` there. ``Config(weighted="sum")``: `grads`
            are those of sums; otherwise of means. The bits are those of a run's first pass.

    Returns:
        A tensor in the gradients' shape and dtype. With sum "two-shot" and "one-shot" it has the bits that real ranks
        get. With "exact" and "direct" the transport of real ranks chooses the order of addition. Here the order is x_0
        + x_1 + x_2 …, as in a ring that starts at rank 0, in fp32 (exact) or rounded to the wire after each addition
        (direct). It is one of the possible orders, and the only one for two ranks.

    Raises:
        ValueError: arguments that cannot be combined, or that attach() would refuse; the message says what is possible.
        TypeError: `config` is of another type, `grads` is not a sequence of tensors, or `exempt_mask` is not a tensor.
    """
    config = chosen(config, "simulate")
    flats = _flats(grads)
    world_size, numel = len(flats), flats[0].numel()
    exempt = _flat_mask(exempt_mask, grads[0])
    config = dataclasses.replace(
        config, wires={ONE_DIMENSIONAL: config.wire}, feedback=Feedback() if residuals is not None else None
    )
    factors = _pack_factors(config, weights, world_size)
    if weights is not None and not any(factors):
        return torch.zeros_like(grads[0])
    flats = [flat if factor else torch.zeros_like(flat) for flat, factor in zip(flats, factors, strict=True)]
    levels = _levels(config, world_size)
    native = chunks.native(config, world_size, ranks_per_host=levels.ranks_per_host if levels else 1)
    slices = _slices(exempt, numel)
    plan = _C.plan_bucket(native, world_size, flats[0], [(count, wire) for _, count, wire in slices])
    codec = _C.Codec(choose_isa(None), choose_codec_threads(None, world_size=1))

    result = torch.empty_like(flats[0])
    if plan.sums_codes:
        layout = plan.layout
        of_one = _of_one_rank(layout, world_size)
        if residuals is not None:
            residuals._prepare(of_one, levels.num_hosts if levels else world_size)
        lossy, exact = (_Places(slices, wire, flats[0]) for wire in (0, _C.EXACT_WIRE))
        for chunk in range(of_one.num_chunks):
            encoders = _Encoders(codec, of_one, chunk, config, residuals)
            parts = encoders.of_ranks(plan, flats, factors, (lossy, exact), levels)
            encoders.write_mean(plan, parts, (lossy, exact), result)
    else:  # the transport adds the whole bucket in one dtype, exempt elements included
        for begin in range(0, numel, _MAX_PIECE_NUMEL):
            piece = slice(begin, begin + _MAX_PIECE_NUMEL)
            result[piece] = _added_by_transport(codec, plan, [flat[piece] for flat in flats], factors)
    return result.view(grads[0].shape)


class Residuals:
    """The residuals of one bucket, kept from one :func:`simulate` call to the next. Each call is one step."""

    def __init__(self) -> None:
        self._of_senders: list[torch.Tensor] = []  # one for each rank, or for each host with two levels
        self._of_means: torch.Tensor | None = None
        self._layout = ""

    def _prepare(self, layout: "_C.BucketLayout", num_senders: int) -> None:
        if not self._of_senders:
            self._of_means, *self._of_senders = torch.zeros(num_senders + 1, layout.padded_numel, dtype=torch.float32)
            self._layout = repr(layout)
        if repr(layout) != self._layout or len(self._of_senders) != num_senders:
            those, these = (len(self._of_senders), self._layout), (num_senders, repr(layout))
            raise ValueError(f"residuals are for {those}, not for {these}: make one Residuals for each bucket")


# ---- sums


def _slices(exempt: torch.Tensor | None, numel: int) -> list[tuple[int, int, int]]:
    """(offset, elements, wire number) of the runs of equal elements of `exempt`, a flat mask."""
    if exempt is None:
        return [(0, numel, 0)]
    exempt_runs, counts = torch.unique_consecutive(exempt, return_counts=True)
    offsets = (counts.cumsum(0) - counts).tolist()
    wires = [_C.EXACT_WIRE if run else 0 for run in exempt_runs.tolist()]
    return list(zip(offsets, counts.tolist(), wires, strict=True))


class _Places:
    """The places in the gradients of a slice list's elements: those of `slices` that have the wire number `wire`."""

    def __init__(self, slices: list[tuple[int, int, int]], wire: int, like: torch.Tensor) -> None:
        places = _C.with_holes([(offset, numel) for offset, numel, of in slices if of == wire], like.element_size())
        offsets, numels = torch.tensor(places or [(0, 0)], dtype=torch.int64).unbind(1)
        self.numel = int(numels.sum())
        self._indices: torch.Tensor | None = None  # int64 [numel], below 0 in holes; None: all elements, in order
        if self.numel != like.numel():
            starts = numels.cumsum(0) - numels
            in_memory = torch.arange(self.numel, dtype=torch.int64) + (offsets - starts).repeat_interleave(numels)
            self._indices = in_memory.where((offsets != _C.HOLE).repeat_interleave(numels), -1)

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The elements, with zeros in holes, as a list of one tensor; an empty list if there are none."""
        if self.numel == 0:
            return []
        if self._indices is None:
            return [flat]
        return [torch.where(self._indices < 0, 0, flat[self._indices.clamp(min=0)])]

    def write(self, flat: torch.Tensor, values: list[torch.Tensor], begin: int, end: int) -> None:
        """Writes elements [begin, end). Without indices `values` is `flat`, which has them already."""
        if begin < end and self._indices is not None:
            indices = self._indices[begin:end]
            flat[indices[indices >= 0]] = values[0][begin:end][indices >= 0]


def _of_one_rank(layout: "_C.BucketLayout", world_size: int) -> "_C.BucketLayout":
    """The bucket in chunks with one part, so small that all ranks' encodings of a chunk fit in _PIECES_NBYTES."""
    formats = [(layout.wire, layout.block_numel, layout.lossy_numel)]
    (of_one,) = _C.bucket_layouts(formats, 1, layout.exact_numel, max(_PIECES_NBYTES // world_size, 1))
    return of_one


class _Encoders:
    """Encodes one chunk for every rank and takes its mean, where the codec sums. The chunk has every rank's part."""

    def __init__(
        self,
        codec: "_C.Codec",
        layout: "_C.BucketLayout",
        chunk: int,
        config: Config,
        residuals: Residuals | None,
    ) -> None:
        self._codec, self._layout, self._chunk = codec, layout, chunk
        self._config, self._residuals = config, residuals

    def of_ranks(
        self,
        plan: "_C.BucketPlan",
        flats: list[torch.Tensor],
        factors: list[float],
        places: tuple[_Places, _Places],
        levels: Hosts | None,
    ) -> torch.Tensor:
        """uint8 [senders, layout.part_stride]: the encoded chunk of each rank, or with `levels` of each host."""
        if levels is None:
            parts = self._parts(len(flats), self._layout)
            for rank, out in enumerate(parts):
                # A rank of weight 0 keeps its residual.
                residual = self._residual(rank) if factors[rank] else None
                scale = plan.pack_scale * factors[rank]
                self._pack(self._layout, scale, flats[rank], places, out, residual)
            return parts
        (within,) = _C.host_layouts([self._layout], self._config.local_wire, 1)
        parts = self._parts(levels.num_hosts, self._layout)
        for host, (ranks, out) in enumerate(zip(levels.groups, parts, strict=True)):
            of_host = self._parts(len(ranks), within)
            for rank, packed in zip(ranks, of_host, strict=True):
                self._pack(within, plan.pack_scale * factors[rank], flats[rank], places, packed)
            self._reduce(within, of_host, 1.0, out, self._residual(host))
        return parts

    def write_mean(
        self, plan: "_C.BucketPlan", parts: torch.Tensor, places: tuple[_Places, _Places], result: torch.Tensor
    ) -> None:
        """Writes the chunk's mean into `result`. If the plan encodes sums, the mean of `parts` is encoded as its owners
        do it and then decoded; otherwise it is taken from `parts` directly, as every rank does it."""
        layout, chunk = self._layout, self._chunk
        if plan.encodes_sums:
            mean = torch.empty(1, layout.part_stride, dtype=torch.uint8)
            self._reduce(layout, parts, plan.reduce_scale, mean, self._residual(None))
            parts = mean
        lossy, exact = values = [place.of(result) for place in places]
        self._codec.unpack(layout, chunk, parts.view(-1), plan.unpack_scale, lossy, exact, len(parts))
        for place, elements, range_of in zip(places, values, (layout.lossy_range, layout.exact_range), strict=True):
            place.write(result, elements, *range_of(chunk, 0))

    def _residual(self, sender: int | None) -> torch.Tensor | None:
        """`sender` None: the encoder of means."""
        if self._residuals is None:
            return None
        return self._residuals._of_means if sender is None else self._residuals._of_senders[sender]

    def _parts(self, count: int, layout: "_C.BucketLayout") -> torch.Tensor:
        return torch.empty(count, layout.part_stride, dtype=torch.uint8)

    def _pack(
        self,
        layout: "_C.BucketLayout",
        scale: float,
        flat: torch.Tensor,
        places: tuple[_Places, _Places],
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        lossy, exact = places
        self._codec.pack(layout, self._chunk, lossy.of(flat), exact.of(flat), scale, out, residual)

    def _reduce(
        self,
        layout: "_C.BucketLayout",
        parts: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        residual: torch.Tensor | None = None,
    ) -> None:
        everybodys = _C.with_num_parts(layout, len(parts))
        self._codec.reduce(everybodys, parts.view(-1), scale, out, residual, self._chunk, self._layout, 1)


def _added_by_transport(
    codec: "_C.Codec", plan: "_C.BucketPlan", slices: list[torch.Tensor], factors: list[float]
) -> torch.Tensor:
    """The mean of `slices` where the transport adds their encodings, in the wire dtype and in rank order."""
    layout, numel = plan.layout, slices[0].numel()
    (packed,) = _C.bucket_layouts([(layout.wire, layout.block_numel, numel)], 1, 0, _ONE_CHUNK)
    total, addend = torch.empty(2, packed.part.nbytes, dtype=torch.uint8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[layout.wire]
    for rank, slice_ in enumerate(slices):
        codec.pack(packed, 0, [slice_], [], plan.pack_scale * factors[rank], addend if rank else total)
        if rank:
            total.view(dtype).add_(addend.view(dtype))
    result = torch.empty_like(slices[0])
    codec.unpack(packed, 0, total, plan.unpack_scale, [result], [])
    return result


# ---- arguments


def _pack_factors(config: Config, weights: Sequence[float] | None, world_size: int) -> list[float]:
    """The factor of each rank's gradients before they are encoded, beside the plan's scale."""
    combinations.refuse("simulate", {"params": config.params, "weighted": config.weighted, "weights": weights})
    if weights is None:
        return [1.0] * world_size
    numbers = [float(weight) for weight in weights]
    if len(numbers) != world_size or not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError(f"weights={weights!r} is not possible: use {world_size} finite numbers, 0 or more")
    unit = sum(numbers) / world_size
    return [(1.0 if config.weighted == "sum" else number) / unit if number else 0.0 for number in numbers]


def _levels(config: Config, world_size: int) -> Hosts | None:
    """None for sums on one level."""
    if not config.needs_two_levels:
        return None
    groups = config.groups
    if groups == hosts.AUTO:
        raise ValueError(f"hosts={config.hosts!r} is not possible in one process: use a number of ranks")
    found = hosts.given(groups, world_size)
    return None if found.flat_reason else found


def _flats(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(grads, torch.Tensor) or not isinstance(grads, Sequence):
        raise TypeError(f"grads must be a list with one tensor for each rank, not {type(grads).__name__}")
    if not grads:
        raise ValueError("grads is empty: pass one tensor for each rank")
    for rank, grad in enumerate(grads):
        if not isinstance(grad, torch.Tensor):
            raise TypeError(f"grads[{rank}] must be a tensor, not {type(grad).__name__}")
        if grad.device.type != "cpu" or grad.layout != torch.strided:
            raise ValueError(f"grads[{rank}] is {grad.layout} on {grad.device}: use dense tensors on cpu")
        if grad.dtype not in _C.GRAD_DTYPES:
            raise ValueError(f"grads[{rank}] is {grad.dtype}: use one of {', '.join(map(str, _C.GRAD_DTYPES))}")
        for name in ("shape", "dtype"):
            first, this = getattr(grads[0], name), getattr(grad, name)
            if this != first:
                raise ValueError(f"grads[{rank}] has {name} {_name(this)}, but grads[0] {_name(first)}: use equal ones")
    return [grad.detach().reshape(-1) for grad in grads]


def _flat_mask(mask: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, torch.Tensor):
        raise TypeError(f"exempt_mask must be a tensor or None, not {type(mask).__name__}")
    if mask.dtype != torch.bool or mask.shape != like.shape or mask.device != like.device:
        found = f"{mask.dtype} of shape {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"exempt_mask is {found}: use torch.bool of shape {tuple(like.shape)} on {like.device}")
    return mask.reshape(-1)


def _name(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
