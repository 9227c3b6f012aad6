"""The compiler of the GPU's kernels: Triton, or NVRTC for the same kernels in CUDA C++. Both kinds give the same bytes,
so ranks may use different ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fusedcomm import env

if TYPE_CHECKING:
    from fusedcomm.kernels.variants import Compiled
    from fusedcomm.native import _C


@dataclass(frozen=True)
class Compiler:
    """A compiler of kernels that can be used here."""

    name: str  # with its version
    reason: str  # why it was chosen, in words
    # Compiles a kernel for a compute capability, 90 for example, or takes it from its cache.
    compile: "Callable[[_C.KernelKey, int], Compiled]"
    folder: str | None  # of its cache; None: Triton's


def choose() -> Compiler:
    """The compiler that FUSEDCOMM_KERNELS asks for. If it is not set: Triton if it can be used, else NVRTC.

    Raises:
        RuntimeError: the compiler asked for cannot be used, or neither can. Triton cannot be used if it is missing or
            its version is not supported.
        ValueError: FUSEDCOMM_KERNELS has an unknown value.
    """
    wanted = env.kernels()
    if wanted == "cuda":
        return _nvrtc(f"{env.KERNELS}=cuda asks for them")
    try:
        return _triton("its version is supported" if wanted is None else f"{env.KERNELS}=triton asks for them")
    except RuntimeError as error:
        if wanted == "triton":
            raise
        no_triton = str(error)
    try:
        return _nvrtc(no_triton)
    except RuntimeError as error:
        raise RuntimeError(f"fusedcomm: {no_triton}. NVRTC cannot take its place: {error}") from error


def _triton(reason: str) -> Compiler:
    try:
        from fusedcomm.kernels import compile
    except ImportError as error:
        raise RuntimeError(f"Triton cannot be imported: {error}") from error
    return Compiler(f"triton {compile.check_triton()}", reason, compile.compile, None)


def _nvrtc(reason: str) -> Compiler:
    from fusedcomm.kernels import nvrtc

    folder = env.cache_folder()
    return Compiler(f"cuda c++ (nvrtc {nvrtc.check_nvrtc()})", reason, partial(nvrtc.compile, folder=folder), folder)
