"""What makes the GPU's kernels: Triton, or NVRTC from the same kernels in CUDA C++. Both give the same bytes, so ranks
may differ in it."""

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
    name: str  # with its version
    reason: str  # for taking this one
    # For a compute capability, e.g. 90; finds what it has made before.
    compile: "Callable[[_C.KernelKey, int], Compiled]"
    folder: str | None  # where it keeps what it has made; None: where Triton does


def choose() -> Compiler:
    """What the user asks for, else Triton, else NVRTC.

    RuntimeError if that is not there, or if Triton's way of launching kernels is not known. ValueError if the user asks
    for something else.
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
        raise RuntimeError(f"fusedcomm: {no_triton}. Nor is there what would do instead: {error}") from error


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
