"""How tensors travel: as they are, cast to 16 bits, or as a compressor of the user's converts them.

In a DistributedOptimizer a compressor with a `config` leaves gradients as they are: the engine encodes them in
fusedcomm's wires while it sums, adds in fp32, and keeps an error for the next step if the configuration says so.
Everything else travels as compress() returns it.
"""

from typing import Any

import torch

from fusedcomm.config import Config, Wire, check

_SENT_AS_THEY_ARE: dict[torch.dtype, Wire] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Compressor:
    """Converts a tensor before it travels, and back. Subclass it for a conversion of your own; this one leaves tensors
    as they are."""

    config: Config | None = None
    """With which a DistributedOptimizer sums gradients. None: they travel as compress() returns them."""

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
    """Converts floating-point tensors to `dtype`."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return (tensor.to(cls.dtype) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor.to(ctx)


class BF16Compressor(_Cast):
    """An optimizer's gradients are sent as bfloat16 and summed in fp32. An operation's tensors are cast, and on CPU
    sent in fp32 all the same."""

    config, dtype = Config("bf16"), torch.bfloat16


class FP16Compressor(_Cast):
    """An optimizer's gradients are sent as float16 and summed in fp32. An operation's tensors are cast, and on CPU
    sent in fp32 all the same."""

    config, dtype = Config("fp16"), torch.float16


class OfGradients(Compressor):
    """Is for a DistributedOptimizer alone."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def __repr__(self) -> str:
        return f"a compression with {self.config}"

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        """Raises ValueError."""
        raise ValueError(
            f"{self} sums gradients, and no single tensors: pass it to "
            "hvd.DistributedOptimizer, or use fusedcomm.GradReducer. An operation takes hvd.Compression.none, .bf16 "
            "or .fp16, or a class with compress() and decompress()"
        )


class Compression:
    """The values of `compression=`. In int8, fp8 and int4 a DistributedOptimizer's gradients are sent as codes with
    scales, and summed in fp32; those with at most one dimension are sent exactly."""

    none = NoneCompressor
    bf16 = BF16Compressor
    fp16 = FP16Compressor
    int8 = OfGradients(Config("int8"))
    fp8 = OfGradients(Config("fp8"))
    int4 = OfGradients(Config("int4"))

    @staticmethod
    def of(config: Config) -> Compressor:
        """A DistributedOptimizer's compressor with every option of fusedcomm: other wires for some parameters, by
        their names, error feedback.

        Raises:
            ValueError: `config` is no :class:`fusedcomm.Config`, has weights, compares parameters, or has options of
                shards.
        """
        check.kind("config", config, Config)
        for name in ("weighted", "compare_every", "compare"):
            if getattr(config, name) != getattr(Config(), name):
                raise ValueError(
                    f"{name}={getattr(config, name)!r} is not possible with Horovod's calls: leave it out, or use "
                    "fusedcomm.GradReducer"
                )
        config.refuse_unsharded()
        return OfGradients(config)


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


def config_of_gradients(compression: Any, dtypes: set[torch.dtype]) -> Config | None:
    """The configuration that sums gradients of these dtypes. None: the compressor is the user's, and no wire of ours.
    Its sums are in fp32, so that gradient_predivide_factor has nothing to do."""
    if compression is Compression.none:
        # Gradients of 16 bits travel as they are; fp32 adds up in either case.
        alike = next(iter(dtypes)) if len(dtypes) == 1 else torch.float32
        return Config(_SENT_AS_THEY_ARE.get(alike, "fp32"))
    config = getattr(compression, "config", None)
    return config if isinstance(config, Config) else None
