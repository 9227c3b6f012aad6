"""Runs the engine's CUDA path in host memory. A fake CUDA driver runs each launch under Triton's interpreter, or from
the PTX that Triton compiles.

Everything except the GPU is real: the hook, the engine, the tables, the packing of arguments, the kernels' code.
"""

import contextlib
import ctypes
import functools
import subprocess
from pathlib import Path

import interpreter
import ptx_kernels
import torch

from fusedcomm.config import Config
from fusedcomm.devices import cuda
from fusedcomm.native import _C
from fusedcomm.session import session
from fusedcomm.session.parameters import grad_dtypes

TILE = 1024
"""Elements per program. It is small, so that small buckets have many tiles."""

NUM_PACK_PROGRAMS = 3

_LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int64, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p
)
_C_TYPES = {"ptr": ctypes.c_void_p, "i64": ctypes.c_int64, "i32": ctypes.c_int32, "f32": ctypes.c_float}
_DTYPES = {
    "*fp32": torch.float32,
    "*bf16": torch.bfloat16,
    "*fp16": torch.float16,
    "*fp64": torch.float64,
    "*i8": torch.int8,
    "*i16": torch.int16,
    "*i32": torch.int32,
    "*i64": torch.int64,
}


LIBRARY = "libfakecuda.so"


def build(folder: Path) -> None:
    """Compiles the driver to folder / LIBRARY."""
    source, library = Path(__file__).parent.parent / "native" / "fake_cuda.cpp", folder / LIBRARY
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)


@functools.cache
def gpu(library: str) -> "FakeCuda":
    """The fake GPU of this process. There is only one, because the library holds only one callback."""
    return FakeCuda(library)


def path(library: str | None, config: Config) -> "contextlib.AbstractContextManager[FakeCuda | None]":
    """FakeCuda.takes_over(), or without a library a context with the CPU path."""
    return gpu(library).takes_over(config) if library else contextlib.nullcontext()


class FakeCuda:
    """A fake GPU. Loads the kernels of a configuration and runs what the engine launches."""

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        self.library.fake_function_name.restype = ctypes.c_char_p
        self.library.fake_function_name.argtypes = [ctypes.c_int64]
        self.library.fake_num_loads.restype = ctypes.c_int64
        self.library.fake_set_context.argtypes = [ctypes.c_int64]
        self.driver = _C.CudaDriver(library)
        self.launches: list[tuple[str, dict]] = []  # by launch: the kernel and its arguments by name
        self.grids: list[int] = []  # by launch: the number of programs
        self.errors: list[BaseException] = []
        self._compiled: ptx_kernels.TritonCompiler | None = None
        self._capability = 0
        self._variants = {}
        self._callback = _LAUNCH(self._launch)  # must stay alive: the library holds only its address
        self.library.fake_on_launch(self._callback)

    def fail(self, call: str, result: int) -> None:
        self.library.fake_fail(call.encode(), result)

    @contextlib.contextmanager
    def capturing(self):
        """Inside this context the driver reports that every stream is being captured into a graph."""
        self.library.fake_capture(1)
        try:
            yield
        finally:
            self.library.fake_capture(0)

    def loader(self, cfg: Config, world_size: int, grad_dtypes, reduces_rows: bool = False) -> "_C.KernelLoader":
        from fusedcomm.kernels import variants

        loader = _C.KernelLoader(self.driver, variants.TILE if self._compiled else TILE)
        for variant in cuda.kernel_variants(cfg, world_size, grad_dtypes, reduces_rows=reduces_rows):
            image = str(variant)
            self._variants[f"{image}:{variant.kernel}"] = variant
            cuda.load(
                loader,
                variants.Compiled(
                    variant=variant,
                    symbol=variant.kernel,
                    cubin=image.encode(),
                    ptx="",
                    num_warps=variants.NUM_WARPS,
                    shared_nbytes=0,
                    params=tuple(_C.kernel_params(variant.kernel)),
                    num_scratch_pointers=2,
                ),
            )
        return loader

    def device(self, backend, cfg: Config, grad_dtypes, reduces_rows: bool = False) -> "_C.CudaDevice":
        return _C.CudaDevice(
            kernels=self.loader(cfg, backend.size(), grad_dtypes, reduces_rows),
            device=torch.device("cpu"),
            isa="fake",
            num_pack_programs=NUM_PACK_PROGRAMS,
            two_levels=cfg.needs_two_levels,
            forced_sync=False,
        )

    @contextlib.contextmanager
    def takes_over(
        self,
        config: Config,
        compiled: "ptx_kernels.TritonCompiler | None" = None,
        capability: int = 90,
    ):
        """Inside this context, fusedcomm.attach with this configuration uses the CUDA path for gradients on the CPU.
        Clears the recorded launches on entry. Raises the first exception of a launch on exit.

        `compiled`: the compiler whose PTX is executed, for the real tile and the compute capability `capability`.
        """
        fake = self
        self._compiled, self._capability = compiled, capability

        class Path:
            codec = "fake"
            s_per_byte = None
            has_two_levels = True

            def __init__(self, of: session.Session) -> None:
                self._grad_dtypes = grad_dtypes(of.parameters, of._reduces_rows)
                self._reduces_rows = of._reduces_rows

            def connect(self, process_group, device, store):
                backend = process_group._get_backend(device)
                native = fake.device(backend, config, self._grad_dtypes, self._reduces_rows)
                return native, _C.StreamTransport(backend, device, nccl=_C.TORCHS_CUDA)

        self.launches.clear()
        self.grids.clear()
        self.errors.clear()
        own = session.Session._path
        session.Session._path = lambda of, two_levels=None: Path(of)
        try:
            yield self
        finally:
            session.Session._path = own
            self.fail("", 0)
            self._compiled = None
            if self.errors:
                raise self.errors[0]

    def _launch(self, function, num_programs, num_threads, shared_nbytes, stream, params) -> int:
        try:
            self._run(self.library.fake_function_name(function).decode(), num_programs, num_threads, params)
        except BaseException as error:  # an exception cannot pass through the C library
            self.errors.append(error)
            return 999
        return 0

    def _interpret(self, kernel, num_programs: int, args: list) -> None:
        from triton.runtime.interpreter import GridExecutor

        interpreter.mend()

        class InPlace(GridExecutor):
            """Skips the copies to the host and back: the arguments are on the host, and their sizes are unknown."""

            def _init_args_hst(self, args, kwargs):
                return args, kwargs

            def _restore_args_dev(self, args, args_hst, kwargs, kwargs_hst):
                pass

        InPlace(kernel.rewrite(), kernel.arg_names, (num_programs,), [])(*args)

    def _execute(self, variant: "_C.KernelKey", num_programs: int, num_threads: int, addresses) -> None:
        """Executes the PTX of a variant. `addresses`: those of its parameters, as cuLaunchKernel is given them."""
        from fusedcomm.kernels import variants

        tile = variants.tile_of(variant.wire or "fp32", variant.block)
        code = self._compiled(variant, tile, self._capability)
        assert code["num_threads"] == num_threads
        arguments = [
            (kind, _C_TYPES[kind].from_address(address).value or 0)
            for address, kind in zip(addresses, _C.kernel_params(variant.kernel), strict=False)
        ]
        arguments += [("ptr", 0)] * code["num_scratch_pointers"]
        ptx_kernels.ptx.launch(
            code["ptx"], num_programs, num_threads, arguments, ptx_kernels.ptx.HostMemory(), code["shared_nbytes"]
        )

    def _run(self, name: str, num_programs: int, num_threads: int, params: int) -> None:
        from fusedcomm.kernels import compile, variants

        variant = self._variants[name]
        assert num_threads == 32 * variants.NUM_WARPS
        kernel = compile.KERNELS[variant.kernel]
        signature, constants_of_variant = compile._signature(variant, capability=0)
        runtime = [(name, kind) for name, _, kind in compile.flattened(kernel, signature)]
        addresses = (ctypes.c_void_p * (len(runtime) + 2)).from_address(params)
        values = {}
        for address, (name, kind), c_kind in zip(addresses, runtime, _C.kernel_params(variant.kernel), strict=False):
            value = _C_TYPES[c_kind].from_address(address).value
            values[name] = _tensor_at(value, _DTYPES[kind]) if c_kind == "ptr" else value
        for scratch in addresses[len(runtime) :]:
            assert ctypes.c_void_p.from_address(scratch).value is None
        self.launches.append((variant.kernel, values))
        self.grids.append(num_programs)
        if self._compiled:
            self._execute(variant, num_programs, num_threads, addresses)
            return
        values = {
            **values,
            **constants_of_variant,
            "TILE": max(TILE, variant.block) if _C.has_scales(variant.wire or "fp32") else TILE,
        }
        arguments = [
            type(kind)(*(values[f"{name}.{field}"] for field in kind._fields))
            if isinstance(kind, tuple)
            else values[name]
            for name, kind in signature.items()
        ]
        self._interpret(kernel, num_programs, arguments)


def _tensor_at(address: int | None, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of one element at that address, which the interpreter takes as a pointer: it uses only the address.
    Empty for a null pointer."""
    if address is None:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_char * dtype.itemsize).from_address(address), dtype=dtype)
