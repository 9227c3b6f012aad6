"""How tensors travel: as they are, in one of fusedcomm's wires, or as a compressor of the user's converts them.

A compressor with a `wire` leaves the tensor as it is: the engine encodes it while it is summed, adds in fp32, and keeps
an error for the next sum if the configuration says so. It works on the CPU, for sums and averages. Everything else
travels as compress() returns it.
"""

import dataclasses
import json
from typing import Any

import torch

from fusedcomm.config import WIRES, Chunks, Config, Feedback, TwoLevels, check
from fusedcomm.literals import Weighted

_GROUPS = {"feedback": Feedback, "chunks": Chunks}
_SENT_AS_THEY_ARE = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Compressor:
    """Converts a tensor before it travels, and back. Subclass it for a conversion of your own; this one leaves tensors
    as they are."""

    wire = ""
    """The wire in which the engine sums: a text that :func:`config_of` can read. Empty: none."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor that travels, and what decompress() needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The result in the tensor's own dtype. ctx: what compress() returned beside `tensor`."""
        return tensor


class NoneCompressor(Compressor):
    """Tensors travel as they are."""


class _Cast(Compressor):
    """Called directly, it converts floating-point tensors to `dtype`."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(_Cast):
    """On cpu sent as bfloat16 and summed in fp32; on cuda cast, and summed in bfloat16."""

    wire, dtype = "bf16", torch.bfloat16


class FP16Compressor(_Cast):
    """On cpu sent as float16 and summed in fp32; on cuda cast, and summed in float16."""

    wire, dtype = "fp16", torch.float16


def _in_wire(wire: str) -> Compressor:
    compressor = NoneCompressor()
    compressor.wire = wire
    return compressor


class Compression:
    """The values of `compression=`. In int8, fp8 and int4 tensors are sent as codes with scales, and summed in fp32;
    those with at most one dimension are sent exactly."""

    none = NoneCompressor
    bf16 = BF16Compressor
    fp16 = FP16Compressor
    int8 = _in_wire("int8")
    fp8 = _in_wire("fp8")
    int4 = _in_wire("int4")

    @staticmethod
    def of(config: Config) -> Compressor:
        """A compressor with every option of fusedcomm: other wires for some parameters, by the names of their
        operations, error feedback.

        Raises:
            ValueError: `config` is no :class:`fusedcomm.Config`, or has checks.
        """
        return _in_wire(text_of(config))


def text_of(config: Config) -> str:
    """A name for the configuration in a request, which every rank can read: the wire, if nothing else differs from the
    defaults; else JSON.

    Raises:
        ValueError: `config` is no Config, compares parameters, or has options of shards.
    """
    check.kind("config", config, Config)
    for name in ("compare_every", "compare"):
        if getattr(config, name) != getattr(Config(), name):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not possible here: operations come one by one, and belong to no "
                "backward pass. Leave it out, or use fusedcomm.GradReducer"
            )
    config.refuse_unsharded()
    defaults = dataclasses.asdict(Config())
    fields = {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}
    fields.pop("wire", None)
    # The order of patterns matters: the first that matches counts.
    return json.dumps({"wire": config.wire, **fields}) if fields else config.wire


def config_of(text: str) -> Config:
    """The configuration that :func:`text_of` has named. Raises ValueError for another text."""
    if text in WIRES:
        fields: Any = {"wire": text}
    else:
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"{text!r} names no wire: use one of {', '.join(map(repr, WIRES))}")
    for name, group in _GROUPS.items():
        if fields.get(name) is not None:
            fields[name] = group(**fields[name])
    if isinstance(fields.get("hosts"), dict):
        fields["hosts"] = TwoLevels(**fields["hosts"])
    return Config(**fields)


def check_compression(compression: Any) -> Any:
    """`compression`, which must be able to compress() and decompress(). Raises TypeError that says what to pass."""
    if callable(getattr(compression, "compress", None)) and callable(getattr(compression, "decompress", None)):
        return compression
    names = [name for name in vars(Compression) if not name.startswith("_") and name != "of"]
    if isinstance(compression, str) and compression in names:
        cure = f"pass hvd.Compression.{compression}"
    elif isinstance(compression, Config):
        cure = "pass hvd.Compression.of(config)"
    elif compression is None:
        cure = "pass hvd.Compression.none"
    else:
        cure = (
            f"pass one of {', '.join(f'hvd.Compression.{name}' for name in names)}, or "
            "hvd.Compression.of(fusedcomm.Config(wire=…)), or a class with compress() and decompress()"
        )
    kind = type(compression).__name__
    raise TypeError(f"fusedcomm.horovod: compression={compression!r}, of type {kind}, is no compressor: {cure}")


def config_of_gradients(compression: Any, dtypes: set[torch.dtype], weighted: Weighted | None) -> Config | None:
    """The configuration that sums gradients of these dtypes. None: the compressor is the user's, and no wire of ours.
    Its sums are in fp32, so that gradient_predivide_factor has nothing to do."""
    wire = getattr(compression, "wire", "")
    if compression is Compression.none:
        # Gradients of 16 bits travel as they are; fp32 adds up in either case.
        wire = _SENT_AS_THEY_ARE.get(next(iter(dtypes)), "fp32") if len(dtypes) == 1 else "fp32"
    if not isinstance(wire, str) or not wire:
        return None
    return dataclasses.replace(config_of(wire), weighted=weighted)


def wire_of(compression: Any, tensor: torch.Tensor) -> str:
    """The wire in which the engine sums `tensor`; see :func:`config_of`. Empty: it travels as compress() returns it.

    Raises:
        ValueError: `compression` needs the engine, which does not take this tensor to other ranks.
    """
    wire = getattr(compression, "wire", "")
    if not isinstance(wire, str) or not wire or tensor.device.type == "cpu":
        return wire if isinstance(wire, str) else ""
    if isinstance(compression, type) and issubclass(compression, _Cast):
        return ""
    raise ValueError(
        f"compression with wire={wire!r} is for tensors on cpu, and this one is on {tensor.device}: use "
        "Compression.bf16, or fusedcomm.GradReducer, which has every wire on cuda"
    )
