"""``fusedcomm.simulate``: what many ranks would end with, in one process, by the codec that real ranks use."""

from collections.abc import Iterator, Sequence

import torch

from fusedcomm.config import Config, choose_codec_threads, choose_isa
from fusedcomm.hosts import Hosts, checked
from fusedcomm.native import _C

_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# All ranks' encodings of one piece of the gradients are held at once, as its owner holds them. Results do not depend
# on where pieces are cut, as long as it is between blocks.
_PIECES_NBYTES = 64 << 20
_MAX_PIECE_NUMEL = 1 << 20
_ONE_CHUNK = 1 << 62


def simulate(
    grads: Sequence[torch.Tensor],
    wire: str = "bf16",
    *,
    sum: str = "auto",
    block: int | None = None,
    predivide: float | str = "auto",
    exempt_mask: torch.Tensor | None = None,
    rotate: bool = False,
    hosts: int | Sequence[Sequence[int]] | None = None,
    local_wire: str = "bf16",
) -> torch.Tensor:
    """The mean that every rank would end with if `grads` were one bucket's gradients on as many ranks.

    Use it to see what a wire does to your gradients, or to train as so many ranks would, without starting any. Beside
    `grads` and the result it holds about 128 MiB at most, or a block for each rank where that is more.

    Args:
        grads: one tensor for each rank, in rank order: fp32, bf16 or fp16, on cpu, all of one shape and dtype. They are
            not changed.
        wire, sum, block, predivide, rotate: as for :func:`fusedcomm.attach`. sum="auto" decides as the engine does for
            a bucket of this size on so many ranks, so fp32 gradients of up to 16 KiB are summed exactly whatever the
            wire, and a 16-bit wire between two ranks is summed directly: pass sum="two-shot" to see the wire itself.
        exempt_mask: bool, in the gradients' shape: True where an element travels in fp32. None: nowhere, whatever its
            place (attach() exempts biases and norms on wires with scales).
        hosts, local_wire: sums on two levels, as for :func:`fusedcomm.attach`; or a number of ranks on each host, which
            then are consecutive.

    Returns:
        A tensor in the gradients' shape and dtype. By two-shot it has the bits that real ranks get. By "exact" and
        "direct" the order of addition is the transport's own; here x_0 + x_1 + x_2 …, as round a ring that starts at
        rank 0, in fp32 (exact) or rounded to the wire after each addition (direct): one of the possible orders, and
        the only one for two ranks.

    Raises:
        ValueError: arguments that do not go together, or that attach() would refuse; says what is possible.
        TypeError: something that is not a tensor.
    """
    flats = _flats(grads)
    world_size, numel = len(flats), flats[0].numel()
    exempt = _flat_mask(exempt_mask, grads[0])
    num_exempt = 0 if exempt is None else int(exempt.sum())
    config = Config(
        wire=wire,
        sum=sum,
        exempt=(),
        block=block,
        predivide=predivide,
        rotate=rotate,
        hosts=_groups(hosts, world_size),
        local_wire=local_wire,
    )
    levels = None if hosts is None else checked(config.hosts, world_size)
    if levels is not None and levels.flat_reason:
        levels = None
    native = config.native(world_size, ranks_per_host=levels.ranks_per_host if levels else 1)
    plan = _C.plan_bucket(native, world_size, flats[0], num_exempt, numel - num_exempt)
    codec = _C.Codec(choose_isa(None), choose_codec_threads(None, world_size=1))

    result = torch.empty_like(flats[0])
    if plan.sum == "two-shot":
        lossy = None if num_exempt == 0 else (~exempt).nonzero().view(-1)
        for piece in _pieces(plan.layout.lossy_numel, lossy, config.block, world_size):
            result[piece] = _two_shot(codec, plan, levels, [flat[piece] for flat in flats], exact=False)
        exact = None if num_exempt == 0 else exempt.nonzero().view(-1)
        for piece in _pieces(plan.layout.exact_numel, exact, config.block, world_size):
            result[piece] = _two_shot(codec, plan, levels, [flat[piece] for flat in flats], exact=True)
    else:  # what is exempt in a bucket that is summed exactly is no stream of its own
        for piece in _pieces(numel, None, config.block, num_held=2):
            result[piece] = _added_by_transport(codec, plan, [flat[piece] for flat in flats])
    return result.view(grads[0].shape)


# ---- sums


def _two_shot(
    codec: "_C.Codec", plan: "_C.BucketPlan", levels: Hosts | None, slices: list[torch.Tensor], exact: bool
) -> torch.Tensor:
    """The mean of a run of one stream, as the rank that owns it takes it and every rank decodes it."""
    own = _part_of(plan.layout, 1, slices[0].numel(), exact)
    if levels is None:
        parts = _packed(codec, own, plan.pack_scale, slices, exact)
    else:
        (packed,) = _C.host_layouts([own], plan.host_layouts[0].wire, 1)
        parts = torch.empty(levels.num_hosts, own.part.nbytes, dtype=torch.uint8)
        for ranks, out in zip(levels.groups, parts, strict=True):
            of_host = _packed(codec, packed, plan.pack_scale, [slices[rank] for rank in ranks], exact)
            (on_host,) = _C.host_layouts(
                [_parts_like(own, levels.ranks_per_host, exact)], packed.wire, levels.ranks_per_host
            )
            codec.reduce(on_host, of_host.view(-1), 1.0, out, to=own)
    mean = torch.empty(own.part.nbytes, dtype=torch.uint8)
    codec.reduce(_parts_like(own, len(parts), exact), parts.view(-1), plan.reduce_scale, mean)
    result = torch.empty_like(slices[0])
    codec.unpack(own, 0, mean, plan.unpack_scale, *_streams(result, exact))
    return result


def _packed(
    codec: "_C.Codec", layout: "_C.BucketLayout", scale: float, slices: list[torch.Tensor], exact: bool
) -> torch.Tensor:
    """uint8 [len(slices), layout.part.nbytes]"""
    parts = torch.empty(len(slices), layout.part.nbytes, dtype=torch.uint8)
    for slice_, out in zip(slices, parts, strict=True):
        codec.pack(layout, 0, *_streams(slice_, exact), scale, out)
    return parts


def _parts_like(layout: "_C.BucketLayout", num_parts: int, exact: bool) -> "_C.BucketLayout":
    """One chunk of `num_parts` parts, each as the only one of `layout`."""
    return _part_of(layout, num_parts, layout.part.exact_numel + layout.part.lossy_numel, exact)


def _added_by_transport(codec: "_C.Codec", plan: "_C.BucketPlan", slices: list[torch.Tensor]) -> torch.Tensor:
    """As `_two_shot`, but the encodings themselves are added, in their dtype."""
    packed = _part_of(plan.layout, 1, slices[0].numel(), exact=False)
    total, addend = torch.empty(2, packed.part.nbytes, dtype=torch.uint8)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[plan.layout.wire]
    for rank, slice_ in enumerate(slices):
        codec.pack(packed, 0, [slice_], [], plan.pack_scale, addend if rank else total)
        if rank:
            total.view(dtype).add_(addend.view(dtype))
    result = torch.empty_like(slices[0])
    codec.unpack(packed, 0, total, plan.unpack_scale, [result], [])
    return result


def _part_of(layout: "_C.BucketLayout", num_parts: int, numel: int, exact: bool) -> "_C.BucketLayout":
    """One chunk of `num_parts` parts that each hold `numel` elements of one stream."""
    numels = (numel * num_parts, 0) if exact else (0, numel * num_parts)
    return _C.bucket_layout(layout.wire, layout.block_numel, num_parts, *numels, _ONE_CHUNK, layout.rotated)


def _streams(slice_: torch.Tensor, exact: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(lossy, exact)"""
    return ([], [slice_]) if exact else ([slice_], [])


def _pieces(
    numel: int, places: torch.Tensor | None, block: int, num_held: int
) -> Iterator[slice] | Iterator[torch.Tensor]:
    """Cuts a stream of `numel` elements so that `num_held` encodings of each piece are affordable.

    The stream's elements are at `places` in the gradients, None: all of them in order. Yields what selects a piece's.
    """
    blocks = min(_PIECES_NBYTES // (4 * num_held), _MAX_PIECE_NUMEL) // block
    step = max(blocks, 1) * block
    for begin in range(0, numel, step):
        end = min(begin + step, numel)
        yield slice(begin, end) if places is None else places[begin:end]


# ---- arguments


def _groups(hosts: int | Sequence[Sequence[int]] | None, world_size: int) -> Sequence[Sequence[int]] | None:
    if isinstance(hosts, bool) or not isinstance(hosts, int):
        if isinstance(hosts, str):
            raise ValueError(f"hosts={hosts!r} is not possible in one process: say how many ranks each host has")
        return hosts
    if hosts < 1 or world_size % hosts:
        raise ValueError(f"hosts={hosts} ranks on each host are not possible with {world_size} ranks")
    return [list(range(first, first + hosts)) for first in range(0, world_size, hosts)]


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
        if grad.dtype not in _GRAD_DTYPES:
            raise ValueError(f"grads[{rank}] is {grad.dtype}: use one of {', '.join(map(str, _GRAD_DTYPES))}")
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
        raise ValueError(
            f"exempt_mask is {mask.dtype} of shape {tuple(mask.shape)} on {mask.device}: it must be torch.bool of the "
            f"gradients' shape {tuple(like.shape)} on {like.device}"
        )
    return mask.reshape(-1)


def _name(value: object) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)
