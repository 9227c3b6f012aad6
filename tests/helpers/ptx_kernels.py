"""Runs compiled kernels by executing their PTX (tests/ptx), in place of the Triton kernels.

A child process compiles, because Triton may interpret in this one. The child is this file, run as a program. NVRTC
compiles in this process.
"""

import base64
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import compiling
import cuda_cpp
import pytest
import torch

from fusedcomm.kernels import nvrtc, variants
from fusedcomm.native import _C

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))  # for the package ptx

import ptx  # noqa: E402

FIELDS = ("kernel", "wire", "block", "grad_dtype", "flat", "rotated", "in_wire", "stochastic", "feedback", "sums")


class TritonCompiler:
    """Compiles variants with Triton, in a child process that starts with the first request. Keeps what it compiled."""

    def __init__(self, triton_folder: Path | None = None, kernels: Path | None = None) -> None:
        """triton_folder: the folder of another Triton than the installed one. kernels: a folder to use as
        fusedcomm.kernels."""
        options = [] if kernels is None else [str(kernels)]
        self._child = compiling.Child(__file__, *options, triton_folder=triton_folder)
        self._compiled: dict[tuple, dict] = {}

    def __call__(self, variant: "_C.KernelKey", tile: int, capability: int) -> dict:
        """{"ptx", "shared_nbytes", "num_scratch_pointers", "num_threads", "cubin" (base 64), "triton"} of a variant
        with this tile."""
        key = variant, tile, capability
        if key not in self._compiled:
            fields = {name: getattr(variant, name) for name in FIELDS}
            fields["grad_dtype"] = variant.grad_dtype and str(variant.grad_dtype).removeprefix("torch.")
            self._compiled[key] = json.loads(self._child.ask(json.dumps([fields, tile, capability])))
        return self._compiled[key]

    def close(self) -> None:
        self._child.close()


class NvrtcCompiler:
    """Compiles variants of fused.cu with NVRTC. Keeps what it compiled."""

    def __init__(self) -> None:
        self._compiled: dict[tuple, dict] = {}

    def __call__(self, variant: "_C.KernelKey", tile: int, capability: int) -> dict:
        key = variant, tile, capability
        if key not in self._compiled:
            num_threads = max(64, tile // 16)
            _, text = nvrtc.compile_source(nvrtc.options(variant, capability, tile, num_threads))
            self._compiled[key] = {
                "ptx": text,
                "shared_nbytes": 0,
                "num_scratch_pointers": 0,
                "num_threads": num_threads,
            }
        return self._compiled[key]

    def close(self) -> None:
        pass


class Compilers:
    """Compilers by name: "newest" and "oldest", the supported versions of Triton, and "nvrtc". Each starts when it is
    first asked for. Skips the test if it is not installed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: dict[str, TritonCompiler | NvrtcCompiler] = {}

    def __call__(self, name: str) -> "TritonCompiler | NvrtcCompiler":
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> "TritonCompiler | NvrtcCompiler":
        if name == "nvrtc":
            try:
                nvrtc.check_nvrtc()
            except RuntimeError as error:
                pytest.skip(str(error))
            return NvrtcCompiler()
        return TritonCompiler(compiling.oldest_triton(self._config) if name == "oldest" else None)

    def close(self) -> None:
        for compiler in self._made.values():
            compiler.close()


class Kernel(cuda_cpp.Kernel):
    """A kernel that is called like a Triton kernel, and runs from its PTX on CPU tensors.

    Tensors are accessed within their own bounds. With Triton use the real tile: of a tile with fewer than 16 elements
    for each thread several threads hold the same ones, so a kernel that works in place has races.
    """

    def __init__(
        self,
        name: str,
        compiler: "TritonCompiler | NvrtcCompiler",
        capability: int,
        counts: "list[ptx.Counts] | None" = None,
    ) -> None:
        """counts: what each launch did is appended. None: nothing is counted."""
        super().__init__(name, None)
        self.compiler, self.capability, self.counts = compiler, capability, counts

    def launch(self, num_programs, *arguments, TILE, **constants):
        fields = [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]
        # Triton's reduce is told with HAS_EXACT what pack and unpack are told with both.
        variant = self.variant_of(fields[0].dtype, {"FLAT": not constants.get("HAS_EXACT", False), **constants})
        code = self.compiler(variant, TILE, self.capability)
        tensors = [x for x in fields if isinstance(x, torch.Tensor)]
        values = [
            (kind, x.data_ptr() if isinstance(x, torch.Tensor) else x)
            for kind, x in zip(_C.kernel_params(self.name), fields, strict=True)
        ]
        values += [("ptr", 0)] * code["num_scratch_pointers"]
        memory = ptx.TensorMemory([(x.data_ptr(), x.numel() * x.element_size()) for x in tensors])
        count = self.counts is not None
        counts = ptx.launch(
            code["ptx"], num_programs, code["num_threads"], values, memory, code["shared_nbytes"], count
        )
        if count:
            self.counts.append(counts)


def replace_kernels(
    monkeypatch,
    compiler: "TritonCompiler | NvrtcCompiler",
    capability: int,
    counts: "list[ptx.Counts] | None" = None,
) -> None:
    """Makes the launchers of fusedcomm.kernels run what `compiler` compiles, for the rest of the test. What each launch
    did is appended to `counts`."""
    for name in cuda_cpp.KERNELS:
        launcher = importlib.import_module(f"fusedcomm.kernels.{name}")
        monkeypatch.setattr(launcher, f"{name}_kernel", Kernel(name, compiler, capability, counts))


def use_kernels(folder: Path) -> None:
    """Makes fusedcomm.kernels the package in `folder`, for the rest of this process."""
    for name in [name for name in sys.modules if name.startswith("fusedcomm.kernels")]:
        del sys.modules[name]
    spec = importlib.util.spec_from_file_location(
        "fusedcomm.kernels", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    package = sys.modules["fusedcomm.kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    sys.modules["fusedcomm"].kernels = package


def compile_on_request() -> None:
    """Reads [fields of a variant, tile, capability] as JSON from each line of stdin. Writes a line with the result."""
    import triton

    if len(sys.argv) > 1:
        use_kernels(Path(sys.argv[1]))
    from fusedcomm.kernels import compile

    for line in sys.stdin:
        fields, tile, capability = json.loads(line)
        fields["grad_dtype"] = fields["grad_dtype"] and getattr(torch, fields["grad_dtype"])
        compile.TILE = tile
        result = compile.compile(variants.Variant(**fields), capability)
        answer = {
            "ptx": result.ptx,
            "shared_nbytes": result.shared_nbytes,
            "num_scratch_pointers": result.num_scratch_pointers,
            "num_threads": 32 * result.num_warps,
            "cubin": base64.b64encode(result.cubin).decode(),
            "triton": triton.__version__,
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    compile_on_request()
