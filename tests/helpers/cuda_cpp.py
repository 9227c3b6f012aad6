"""Runs kernels/fused.cu, unchanged, in place of the Triton kernels. A C++ compiler compiles it for the CPU
(tests/native/cuda_on_cpu.h), NVRTC for a GPU."""

import ctypes
import functools
import re
import subprocess
from pathlib import Path

import torch

from fusedcomm.kernels import nvrtc, variants
from fusedcomm.native import _C

LIBRARY = "libcuda_cpp.so"
NATIVE = Path(__file__).parents[1] / "native"
KERNELS = ("pack", "reduce", "unpack", "scale")
TYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}


def build(folder: Path) -> None:
    """Compiles the kernels for the CPU into folder / LIBRARY. One library serves all variants: the macros that
    distinguish them become variables."""
    names = nvrtc.macros(variants.Variant("scale"), 64, 64)
    lines = ['#include "cuda_on_cpu.h"', *(f'extern "C" {{ int of_variant_{name}; }}' for name in names)]
    lines += [f"#define {name} of_variant_{name}" for name in names]
    lines += [f"#define {kernel.upper()}" for kernel in KERNELS]
    lines += [f'#include "{nvrtc.SOURCE}"', *(f"CUDA_ON_CPU_EXPORT({kernel}_kernel)" for kernel in KERNELS)]
    source, library = folder / "cuda_cpp.cpp", folder / LIBRARY
    source.write_text("\n".join(lines) + "\n")
    # _FORTIFY_SOURCE would make longjmp refuse to change stacks. The sanitizer's library is not linked: cuda_on_cpu.h
    # defines the one function that is needed.
    compiler = ["g++", "-std=c++17", "-O2", "-fPIC", "-ffp-contract=off", "-Wno-unknown-pragmas"]
    flags = ["-fsanitize=alignment", "-U_FORTIFY_SOURCE", f"-I{NATIVE}"]
    subprocess.run([*compiler, *flags, "-c", str(source), "-o", f"{library}.o"], check=True)
    subprocess.run(["g++", "-shared", f"{library}.o", "-o", str(library)], check=True)


@functools.cache
def _formats() -> list[str]:
    return re.search(r"enum \{ (.*?) \};", nvrtc.HEADER.read_text())[1].split(", ")


def launch_on_cpu(library: ctypes.CDLL, variant: variants.Variant, tile: int, num_programs: int, params: int) -> None:
    """Launches a kernel of the library that `build` made.

    Args:
        tile: elements per program.
        params: address of an array with a pointer to each argument, as cuLaunchKernel takes it.

    Raises:
        AssertionError: the kernel did something that is an error on a GPU; see cuda_on_cpu.h.
    """
    num_threads = max(64, tile // 16)
    for name, value in nvrtc.macros(variant, tile, num_threads).items():
        number = _formats().index(value) if isinstance(value, str) else value
        ctypes.c_int.in_dll(library, f"of_variant_{name}").value = number
    num_faults = library[f"launch_{variant.kernel}_kernel"](num_threads, num_programs, ctypes.c_void_p(params))
    assert num_faults == 0, f"{variant}: {num_faults} faults, printed to stderr"


class Kernel:
    """A kernel that is called like a Triton kernel: ``kernel[(num_programs,)](*arguments, **constants)``."""

    def __init__(self, name: str, library: str | None) -> None:
        """`library`: path of the library that `build` made; None runs the kernel on the current GPU."""
        self.name, self.library = name, library and ctypes.CDLL(library)

    def __getitem__(self, grid):
        return functools.partial(self.launch, *grid)

    def launch(self, num_programs, *arguments, TILE, **constants):
        fields = [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]
        values = [
            TYPES[kind](x.data_ptr() if isinstance(x, torch.Tensor) else x)
            for kind, x in zip(_C.kernel_params(self.name), fields, strict=True)
        ]
        params = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        variant = self.variant_of(fields[0].dtype, constants)
        if self.library:
            launch_on_cpu(self.library, variant, TILE, num_programs, ctypes.addressof(params))
        else:
            launch_on_gpu(variant, TILE, num_programs, params)

    def variant_of(self, dtype: torch.dtype, constants: dict[str, object]) -> variants.Variant:
        from fusedcomm.kernels.constants import FEEDBACK_IDS, WIRE_IDS

        wires, formats = ({number: name for name, number in ids.items()} for ids in (WIRE_IDS, FEEDBACK_IDS))
        return variants.Variant(
            self.name,
            wires.get(constants.get("WIRE")),
            constants.get("BLOCK", 0),
            dtype if self.name in ("pack", "unpack") else None,
            constants.get("FLAT", True),
            rotated=constants.get("ROTATED", False),
            in_wire=wires.get(constants.get("IN_WIRE")),
            stochastic=constants.get("STOCHASTIC", False),
            feedback=formats[constants.get("FEEDBACK", 0)],
            sums=constants.get("SUMS", False),
        )


def launch_on_gpu(variant: variants.Variant, tile: int, num_programs: int, params: ctypes.Array) -> None:
    driver, function, num_threads = _loaded(variant, tile, torch.cuda.current_device())
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    assert driver.cuLaunchKernel(function, num_programs, 1, 1, num_threads, 1, 1, 0, stream, params, None) == 0


@functools.cache
def _loaded(variant, tile, device):
    num_threads = max(64, tile // 16)
    capability = "{}{}".format(*torch.cuda.get_device_capability(device))
    cubin, _ = nvrtc.compile_source(nvrtc.options(variant, int(capability), tile, num_threads))
    driver, module, function = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
    assert driver.cuModuleLoadData(ctypes.byref(module), cubin) == 0
    assert driver.cuModuleGetFunction(ctypes.byref(function), module, f"{variant.kernel}_kernel".encode()) == 0
    return driver, function, num_threads
