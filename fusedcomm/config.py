"""What a user can choose, checked when it is chosen."""

import dataclasses
import fnmatch
import os

import torch

from fusedcomm import env
from fusedcomm.native import _C

WIRES = ("fp32", "bf16", "fp16", "int8", "fp8", "fp8_e5m2", "int4")
SUMS = ("auto", "exact", "direct", "two-shot")

ONE_DIMENSIONAL = "1d"

# Biases and norms: a fraction of a percent of the elements, and most of the damage when they are quantised.
_DEFAULT_EXEMPT = {wire: (ONE_DIMENSIONAL,) for wire in WIRES if _C.has_scales(wire)}

MAX_CODEC_THREADS = 4

# What a chunk carries to each rank by default. Two network namespaces, one 32 MiB bucket, int8 two-shot, a step's
# speed-up over DDP's default at 1 and 10 Gbit/s by chunk: 128 KiB ×2.4 ×1.1, 512 KiB ×2.9 ×1.55, 1 MiB ×2.8 ×1.5.
CHUNK_NBYTES_PER_RANK = 256 << 10
MIN_DEFAULT_CHUNK_NBYTES, MAX_DEFAULT_CHUNK_NBYTES = 512 << 10, 8 << 20

# On an accelerator a chunk costs three launches and two collectives, so DDP's buckets (25 MiB of gradients) are not
# cut: up to 32 MiB of fp32 gradients fit on a 16-bit wire, 62 MiB on int8.
DEVICE_CHUNK_NBYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class LocalOptions:
    """What may differ from rank to rank, since no byte depends on it. None: chosen by the device's path."""

    isa: str | None = None
    codec_threads: int | None = None
    sm_limit: int | None = None


@dataclasses.dataclass(frozen=True)
class Config:
    """One configuration of the engine; the arguments of :func:`fusedcomm.attach`, which documents them.

    Raises:
        ValueError: a field is out of range or two fields cannot go together; names the field, its value and what
            is possible.
    """

    wire: str = "bf16"
    sum: str = "auto"
    exempt: tuple[str, ...] | None = None
    block: int | None = None
    predivide: float | str = "auto"
    chunk_nbytes: int | None = None
    chunks_in_flight: int = 4
    rotate: bool = False
    verify_every: int = 0

    def __post_init__(self) -> None:
        _check_choice("wire", self.wire, WIRES)
        _check_choice("sum", self.sum, SUMS)
        if self.exempt is None:
            object.__setattr__(self, "exempt", _DEFAULT_EXEMPT.get(self.wire, ()))
        if self.block is None:
            object.__setattr__(self, "block", _C.default_block_numel(self.wire))
        if isinstance(self.exempt, str):
            raise ValueError(
                f"exempt={self.exempt!r} is one string: pass a tuple of patterns, exempt=({self.exempt!r},)"
            )
        object.__setattr__(self, "exempt", tuple(self.exempt))
        if any(not isinstance(pattern, str) or not pattern for pattern in self.exempt):
            raise ValueError(
                f"exempt={self.exempt!r}: every pattern must be '1d' or a parameter name, wildcards allowed"
            )
        for field in ("block", "chunk_nbytes", "chunks_in_flight", "verify_every"):
            value = getattr(self, field)
            if field == "chunk_nbytes" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{field}={value!r} is not possible: it must be a whole number")
        if self.verify_every < 0:
            raise ValueError(f"verify_every={self.verify_every} is not possible: use a number of steps, or 0 for never")
        if not isinstance(self.rotate, bool):
            raise ValueError(f"rotate={self.rotate!r} is not possible: use True or False")
        if self.predivide != "auto" and (
            isinstance(self.predivide, (bool, str))
            or not isinstance(self.predivide, (int, float))
            or self.predivide <= 0
        ):
            raise ValueError(f"predivide={self.predivide!r} is not possible: use 'auto' or a positive number")
        if self.sum == "direct" and self.exempt:
            raise ValueError(
                f"sum='direct' adds the whole bucket in {self.wire} and cannot carry exempt={self.exempt!r} exactly: "
                "use sum='two-shot' or exempt=()"
            )
        self.native(world_size=1)

    def chunk_nbytes_for(self, world_size: int, device_type: str = "cpu") -> int:
        if self.chunk_nbytes is not None:
            return self.chunk_nbytes
        if device_type != "cpu":
            return DEVICE_CHUNK_NBYTES
        return min(max(CHUNK_NBYTES_PER_RANK * world_size, MIN_DEFAULT_CHUNK_NBYTES), MAX_DEFAULT_CHUNK_NBYTES)

    def native(self, world_size: int, device_type: str = "cpu") -> "_C.WireConfig":
        return _C.WireConfig(
            wire=self.wire,
            sum=self.sum,
            block=self.block,
            predivide=0.0 if self.predivide == "auto" else float(self.predivide),
            chunk_nbytes=self.chunk_nbytes_for(world_size, device_type),
            chunks_in_flight=self.chunks_in_flight,
            rotate=self.rotate,
        )

    @property
    def exempt_1d(self) -> bool:
        return ONE_DIMENSIONAL in self.exempt

    @property
    def exempt_names(self) -> tuple[str, ...]:
        return tuple(pattern for pattern in self.exempt if pattern != ONE_DIMENSIONAL)

    def is_exempt(self, name: str, parameter: torch.Tensor) -> bool:
        if self.exempt_1d and parameter.dim() <= 1:
            return True
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.exempt_names)

    def check_patterns(self, names: list[str]) -> None:
        """Raises ValueError for a pattern that no parameter's name matches: a typo would otherwise do nothing."""
        for pattern in self.exempt_names:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise ValueError(
                    f"exempt pattern {pattern!r} matches none of the {len(names)} parameters that DDP synchronises, "
                    f"for example {', '.join(names[:3])}"
                )


def _check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r} is not known: use one of {', '.join(map(repr, choices))}")


def choose_isa(isa: str | None) -> str:
    """The argument, else the environment. Raises ValueError for what this machine cannot run."""
    chosen = env.isa() if isa is None else isa
    _check_choice("isa", chosen, ("auto", *_C.available_isas()))
    return chosen


def choose_codec_threads(codec_threads: int | None, world_size: int) -> int:
    """The argument, else the environment, else half of this rank's share of the cores, from 1 to 4."""
    if codec_threads is None:
        codec_threads = env.codec_threads()
    if codec_threads is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        local_ranks = env.local_world_size() or world_size
        return max(1, min(MAX_CODEC_THREADS, cores // (2 * local_ranks)))
    if isinstance(codec_threads, bool) or not isinstance(codec_threads, int) or codec_threads < 1:
        raise ValueError(f"codec_threads={codec_threads!r} is not possible: use a whole number, at least 1")
    return codec_threads
