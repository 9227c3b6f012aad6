"""The mean that many ranks get, computed in one process with the codec of real ranks. tests/codec/test_simulation.py
compares it with the reference and with real ranks."""

import dataclasses
from collections.abc import Sequence

import torch

from fusedcomm import chunks
from fusedcomm.config import ONE_DIMENSIONAL, Config, Feedback, choose_codec_threads
from fusedcomm.native import _C
from fusedcomm.ranks import hosts
from fusedcomm.ranks.hosts import Hosts

_ONE_CHUNK = 1 << 62
"""Bytes of a chunk that no bucket exceeds."""


def simulate(
    grads: Sequence[torch.Tensor],
    config: Config | str = "bf16",
    *,
    exempt_mask: torch.Tensor | None = None,
    residuals: "Residuals | None" = None,
    weights: Sequence[float] | None = None,
) -> torch.Tensor:
    """Returns the mean that every rank gets if `grads` are the gradients of one bucket, one tensor for each rank.

    Args:
        grads: fp32, bf16 or fp16, on cpu, all of one shape and dtype.
        config: `config.wires` is not used. hosts="auto" is one level.
        exempt_mask: bool tensor in the gradients' shape: True where an element is sent in fp32. None: nowhere.
        residuals: of the steps before. None: `config.feedback` has no effect.
        weights: the handle's `weight` of each rank.

    Returns:
        With sum "two-shot" and "one-shot" the bits that real ranks get. With "exact" and "direct" the order of addition
        is x_0 + x_1 + x_2 …, the only one for two ranks.
    """
    config = Config(config) if isinstance(config, str) else config
    flats = [grad.detach().reshape(-1) for grad in grads]
    world_size, numel = len(flats), flats[0].numel()
    feedback = None if residuals is None else Feedback(residuals.format)
    config = dataclasses.replace(config, wires={ONE_DIMENSIONAL: config.wire}, feedback=feedback)
    factors = _pack_factors(config, weights, world_size)
    if weights is not None and not any(factors):
        return torch.zeros_like(grads[0])
    flats = [flat if factor else torch.zeros_like(flat) for flat, factor in zip(flats, factors, strict=True)]
    levels = hosts.given(config.groups, world_size) if config.needs_two_levels else None
    levels = None if levels is None or levels.flat_reason else levels
    native = chunks.native(config, world_size, ranks_per_host=levels.ranks_per_host if levels else 1)
    slices = _slices(None if exempt_mask is None else exempt_mask.reshape(-1), numel)
    plan = _C.plan_bucket(native, world_size, flats[0], [(count, wire) for _, count, wire in slices])
    codec = _C.Codec("auto", choose_codec_threads(None, world_size=1))
    if not plan.sums_codes:  # the transport adds the whole bucket in one dtype, exempt elements included
        return _added_by_transport(codec, plan, flats, factors).view(grads[0].shape)
    layout = plan.layout
    formats = [(layout.wire, layout.block_numel, layout.lossy_numel)]
    (of_one,) = _C.bucket_layouts(formats, 1, layout.exact_numel, _ONE_CHUNK)
    if residuals is not None:
        residuals.prepare(of_one.padded_numel, levels.num_hosts if levels else world_size)
    bucket = _Bucket(codec, of_one, config, residuals, [_Places(slices, wire, flats[0]) for wire in (0, _C.EXACT_WIRE)])
    result = torch.empty_like(flats[0])
    bucket.write_mean(plan, bucket.of_senders(plan, flats, factors, levels), result)
    return result.view(grads[0].shape)


class Residuals:
    """The residuals of one bucket, kept from one :func:`simulate` call to the next. Each call is one step."""

    def __init__(self, format: str = "fp32") -> None:
        self.format = format
        self.of_senders: list[torch.Tensor] = []  # one for each rank, or for each host with two levels
        self.of_means: torch.Tensor | None = None

    def prepare(self, padded_numel: int, num_senders: int) -> None:
        if not self.of_senders:
            nbytes = _C.residual_nbytes(self.format, padded_numel)
            self.of_means, *self.of_senders = torch.zeros(1 + num_senders, nbytes, dtype=torch.uint8)


_Residual = tuple[str, torch.Tensor, int]
"""(format, bytes, elements) of an encoder's residual."""


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
        in_memory = torch.arange(int(numels.sum()), dtype=torch.int64)
        in_memory += (offsets - (numels.cumsum(0) - numels)).repeat_interleave(numels)
        self.indices = in_memory.where((offsets != _C.HOLE).repeat_interleave(numels), -1)  # below 0 in holes

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The elements, with zeros in holes, as a list of one tensor; an empty list if there are none."""
        if not len(self.indices):
            return []
        return [torch.where(self.indices < 0, 0, flat[self.indices.clamp(min=0)])]

    def write(self, flat: torch.Tensor, values: list[torch.Tensor]) -> None:
        if values:
            flat[self.indices[self.indices >= 0]] = values[0][self.indices >= 0]


class _Bucket:
    """Encodes a bucket, of which one chunk has every rank's part, and takes its mean, where the codec sums."""

    def __init__(
        self,
        codec: "_C.Codec",
        layout: "_C.BucketLayout",
        config: Config,
        residuals: Residuals | None,
        places: list[_Places],
    ) -> None:
        self._codec, self._layout, self._config = codec, layout, config
        self._residuals, self._places = residuals, places

    def of_senders(
        self, plan: "_C.BucketPlan", flats: list[torch.Tensor], factors: list[float], levels: Hosts | None
    ) -> torch.Tensor:
        """uint8 [senders, layout.part_stride]: the encoded bucket of each rank, or with `levels` of each host."""
        if levels is None:
            parts = _parts(len(flats), self._layout)
            for rank, out in enumerate(parts):
                # A rank of weight 0 keeps its residual.
                residual = self._residual(rank) if factors[rank] else None
                self._pack(self._layout, plan.pack_scale * factors[rank], flats[rank], out, residual)
            return parts
        (within,) = _C.host_layouts([self._layout], self._config.local_wire, 1)
        parts = _parts(levels.num_hosts, self._layout)
        for host, (ranks, out) in enumerate(zip(levels.groups, parts, strict=True)):
            of_host = _parts(len(ranks), within)
            for rank, packed in zip(ranks, of_host, strict=True):
                self._pack(within, plan.pack_scale * factors[rank], flats[rank], packed)
            self._reduce(within, of_host, 1.0, out, self._residual(host))
        return parts

    def write_mean(self, plan: "_C.BucketPlan", parts: torch.Tensor, result: torch.Tensor) -> None:
        """Writes the mean of `parts`. If the plan encodes sums, the mean is encoded as its owners do it and decoded."""
        if plan.encodes_sums:
            mean = _parts(1, self._layout)
            self._reduce(self._layout, parts, plan.reduce_scale, mean, self._residual(None))
            parts = mean
        lossy, exact = values = [place.of(result) for place in self._places]
        self._codec.unpack(self._layout, 0, parts.view(-1), plan.unpack_scale, lossy, exact, len(parts))
        for place, elements in zip(self._places, values, strict=True):
            place.write(result, elements)

    def _residual(self, sender: int | None) -> _Residual | None:
        """`sender` None: the encoder of means."""
        if self._residuals is None:
            return None
        kept = self._residuals.of_means if sender is None else self._residuals.of_senders[sender]
        return self._residuals.format, kept, self._layout.padded_numel

    def _pack(
        self,
        layout: "_C.BucketLayout",
        scale: float,
        flat: torch.Tensor,
        out: torch.Tensor,
        residual: _Residual | None = None,
    ) -> None:
        lossy, exact = (place.of(flat) for place in self._places)
        self._codec.pack(layout, 0, lossy, exact, scale, out, residual)

    def _reduce(
        self,
        layout: "_C.BucketLayout",
        parts: torch.Tensor,
        scale: float,
        out: torch.Tensor,
        residual: _Residual | None = None,
    ) -> None:
        everybodys = _C.with_num_parts(layout, len(parts))
        self._codec.reduce(everybodys, parts.view(-1), scale, out, residual, 0, self._layout, 1)


def _parts(count: int, layout: "_C.BucketLayout") -> torch.Tensor:
    return torch.empty(count, layout.part_stride, dtype=torch.uint8)


def _added_by_transport(
    codec: "_C.Codec", plan: "_C.BucketPlan", flats: list[torch.Tensor], factors: list[float]
) -> torch.Tensor:
    """The mean where the transport adds the encodings, in the wire dtype and in rank order."""
    layout, numel = plan.layout, flats[0].numel()
    (packed,) = _C.bucket_layouts([(layout.wire, layout.block_numel, numel)], 1, 0, _ONE_CHUNK)
    total, addend = torch.empty(2, packed.part.nbytes, dtype=torch.uint8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[layout.wire]
    for rank, flat in enumerate(flats):
        codec.pack(packed, 0, [flat], [], plan.pack_scale * factors[rank], addend if rank else total)
        if rank:
            total.view(dtype).add_(addend.view(dtype))
    result = torch.empty_like(flats[0])
    codec.unpack(packed, 0, total, plan.unpack_scale, [result], [])
    return result


def _pack_factors(config: Config, weights: Sequence[float] | None, world_size: int) -> list[float]:
    """The factor of each rank's gradients before they are encoded, beside the plan's scale."""
    if weights is None:
        return [1.0] * world_size
    unit = sum(weights) / world_size
    return [(1.0 if config.weighted == "sum" else weight) / unit if weight else 0.0 for weight in weights]
