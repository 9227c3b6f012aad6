"""Runs compiled kernels by executing their PTX (tests/ptx), in place of the Triton kernels.

A child process compiles, because Triton may interpret in this one. The child is this file, run as a program.
"""

import base64
import functools
import importlib
import importlib.util
import json
import sys
from pathlib import Path

import compiling
import pytest
import torch

from fusedcomm.kernels import variants
from fusedcomm.native import _C

TESTS = Path(__file__).parents[1]
if str(TESTS) not in sys.path:
    sys.path.append(str(TESTS))  # for the package ptx

import ptx  # noqa: E402

KERNELS = ("pack", "reduce", "unpack", "scale")
FIELDS = ("kernel", "wire", "block", "grad_dtype", "in_wire", "feedback", "sums")


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


class Compilers:
    """Compilers by name: "newest" and "oldest", the supported versions of Triton. Each starts when it is first asked
    for. Skips the test if it is not installed."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._made: dict[str, TritonCompiler] = {}

    def __call__(self, name: str) -> "TritonCompiler":
        if name not in self._made:
            folder = compiling.oldest_triton(self._config) if name == "oldest" else None
            self._made[name] = TritonCompiler(folder)
        return self._made[name]

    def close(self) -> None:
        for compiler in self._made.values():
            compiler.close()


class Kernel:
    """A kernel that is called like a Triton kernel, and runs from its PTX on CPU tensors:
    ``kernel[(num_programs,)](*arguments, **constants)``.

    Tensors are accessed within their own bounds. Use the real tile: of a tile with fewer than 16 elements for each
    thread several threads hold the same ones, so a kernel that works in place has races.
    """

    def __init__(self, name: str, compiler: "TritonCompiler", capability: int) -> None:
        self.name, self.compiler, self.capability = name, compiler, capability

    def __getitem__(self, grid):
        return functools.partial(self.launch, *grid)

    def launch(self, num_programs, *arguments, TILE, **constants):
        fields = [x for argument in arguments for x in (argument if isinstance(argument, tuple) else (argument,))]
        code = self.compiler(self.variant_of(fields[0].dtype, constants), TILE, self.capability)
        tensors = [x for x in fields if isinstance(x, torch.Tensor)]
        values = [
            (kind, x.data_ptr() if isinstance(x, torch.Tensor) else x)
            for kind, x in zip(_C.kernel_params(self.name), fields, strict=True)
        ]
        values += [("ptr", 0)] * code["num_scratch_pointers"]
        memory = ptx.TensorMemory([(x.data_ptr(), x.numel() * x.element_size()) for x in tensors])
        ptx.launch(code["ptx"], num_programs, code["num_threads"], values, memory, code["shared_nbytes"])

    def variant_of(self, dtype: torch.dtype, constants: dict[str, object]) -> "_C.KernelKey":
        from fusedcomm.kernels.constants import WIRE_IDS

        wires = {number: name for name, number in WIRE_IDS.items()}
        return variants.Variant(
            self.name,
            wires.get(constants.get("WIRE")),
            constants.get("BLOCK", 0),
            dtype if self.name in ("pack", "unpack") else None,
            in_wire=wires.get(constants.get("IN_WIRE")),
            feedback=bool(constants.get("FEEDBACK")),
            sums=constants.get("SUMS", False),
        )


def replace_kernels(monkeypatch, compiler: "TritonCompiler", capability: int) -> None:
    """Makes launchers.py run what `compiler` compiles, for the rest of the test."""
    for name in KERNELS:
        module = importlib.import_module(f"fusedcomm.kernels.{name}")
        monkeypatch.setattr(module, f"{name}_kernel", Kernel(name, compiler, capability))


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
        compile.tile_of = lambda wire, block, tile=tile: tile
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
