"""Compiles fused.cu, the same kernels in CUDA C++, by NVRTC. They run where Triton cannot be used, or on request.

NVRTC is one library, which torch's CUDA builds install. Compiling needs neither a CUDA toolkit nor a GPU.
"""

import contextlib
import ctypes
import functools
import hashlib
import re
from pathlib import Path

import torch

from fusedcomm import files
from fusedcomm.native import _C

from .variants import NUM_WARPS, TILE, Compiled

SOURCE = Path(__file__).with_name("fused.cu")
HEADER = Path(__file__).with_name("arithmetic.cuh")
"""The file that fused.cu includes. NVRTC is given the text of both, so it looks for no files."""

MAJORS = (13, 12)
"""Major versions of NVRTC to try after the one of torch's own CUDA, the preferred one first."""

FORMATS = {None: "none", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def check_nvrtc() -> str:
    """NVRTC's version, "13.0" for example. Raises RuntimeError if NVRTC cannot be loaded."""
    return _library()[1]


def macros(variant: "_C.KernelKey", tile: int, num_threads: int) -> dict[str, str | int]:
    """The macros of fused.cu for a variant: formats by their names in arithmetic.cuh, everything else as numbers.

    tile: elements. num_threads: threads of a thread block.
    """
    wire = variant.wire or "fp32"
    return {
        "WIRE": wire,
        "IN_WIRE": variant.in_wire or wire,
        "GRAD": FORMATS[variant.grad_dtype],
        "FEEDBACK": variant.feedback or "none",
        "BLOCK": variant.block,
        "TILE": tile,
        "NUM_THREADS": num_threads,
        "FLAT": int(variant.flat),
        "ROTATED": int(variant.rotated),
        "STOCHASTIC": int(variant.stochastic),
        "SUMS": int(variant.sums),
    }


def options(
    variant: "_C.KernelKey", capability: int, tile: int = TILE, num_threads: int = 32 * NUM_WARPS
) -> tuple[str, ...]:
    """NVRTC's options to compile a variant for a compute capability; `tile` and `num_threads` as for macros()."""
    defined = {variant.kernel.upper(): 1, **macros(variant, tile, num_threads)}
    # -default-device: NVRTC 13.0 takes a lambda in a kernel for host code.
    always = f"-arch=sm_{capability}", "-std=c++17", "-fmad=false", "-default-device"
    return *always, *(f"-D{name}={x}" for name, x in defined.items())


def compile(variant: "_C.KernelKey", capability: int, folder: str | None = None) -> Compiled:
    """Compiles one kernel for a compute capability, 90 for example. Caches the cubin in `folder`, unless that is None.

    Raises RuntimeError if NVRTC cannot compile the kernel (the text has its log), or if the kernel's parameters are not
    those that the engine passes. The result's `ptx` is empty if the cubin came from the cache.
    """
    symbol, params = f"{variant.kernel}_kernel", tuple(_C.kernel_params(variant.kernel))
    told = options(variant, capability)
    # Includes the parameters, because those of a cached cubin are not checked again.
    identity = SOURCE.read_text(), HEADER.read_text(), told, params, check_nvrtc()
    digest = hashlib.sha256(repr(identity).encode()).hexdigest()
    kept = None if folder is None else Path(folder) / f"{symbol}-{digest}.cubin"
    ptx = ""
    if kept is not None and kept.exists():
        cubin = kept.read_bytes()
    else:
        cubin, ptx = compile_source(told)
        _check_params(ptx, symbol, params)
        _keep(cubin, kept)
    return Compiled(variant, symbol, cubin, ptx, NUM_WARPS, 0, params, 0)


def _keep(cubin: bytes, place: Path | None) -> None:
    """Writes `cubin` to `place`. Does nothing if that is None or cannot be written: the next process compiles again."""
    if place is None:
        return
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(place) as file:
            file.write(cubin)


def _check_params(ptx: str, symbol: str, expected: tuple[str, ...]) -> None:
    """Raises RuntimeError unless the kernel's parameters are `expected`. PTX does not tell pointers from integers."""
    kinds = {"ptr": "64", "i64": "64", "i32": "32", "f32": "f32"}
    entry = re.search(rf"\.entry\s+{symbol}\s*\((.*?)\)", ptx, re.DOTALL)
    found = re.findall(r"\.param\s+\.(\w+)", entry[1]) if entry else []
    if [kind.lstrip("usb") for kind in found] != [kinds[param] for param in expected]:
        raise RuntimeError(
            f"NVRTC compiled {symbol} with the parameters {found}, but the engine passes {expected}. The kernels and "
            "the extension have different versions: rebuild fusedcomm"
        )


# ---- the library


@functools.cache
def _library() -> tuple[ctypes.CDLL, str]:
    """NVRTC and its version. Raises RuntimeError if no candidate can be loaded."""
    errors = []
    for name in _candidates():
        try:
            library = ctypes.CDLL(name)
            # It opens this one by name when it compiles, and does not look beside itself.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
        except OSError as error:
            errors.append(str(error))
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return library, f"{major.value}.{minor.value}"
    raise RuntimeError(
        f"NVRTC cannot be loaded ({'; '.join(errors)}). torch's CUDA builds install it; for other builds: pip install "
        "'nvidia-cuda-nvrtc>=13,<14', or nvidia-cuda-nvrtc-cu12 for CUDA 12"
    )


def _candidates() -> list[str]:
    """The libraries to try, in order: for each major version the files of installed packages, then a name for the
    system to find. The version of torch's own CUDA comes first, because the driver must be able to load its code."""
    try:
        import nvidia  # a namespace package; only its folders are of use

        folders = [Path(folder) for folder in nvidia.__path__]
    except ImportError:
        folders = []
    own = int(torch.version.cuda.partition(".")[0]) if torch.version.cuda else MAJORS[0]
    names = [f"libnvrtc.so.{major}" for major in dict.fromkeys((own, *MAJORS))]
    return [
        str(place) for name in names for place in (*(p for f in folders for p in f.glob(f"*/lib/{name}")), Path(name))
    ]


def compile_source(options: tuple[str, ...]) -> tuple[bytes, str]:
    """(cubin, PTX) of fused.cu, compiled with these options. Raises RuntimeError, with NVRTC's log, if it fails."""
    library, version = _library()
    program = ctypes.c_void_p()
    source, header = ((file.read_bytes(), file.name.encode()) for file in (SOURCE, HEADER))
    included = ((ctypes.c_char_p * 1)(text) for text in header)
    _require(library, library.nvrtcCreateProgram(ctypes.byref(program), *source, 1, *included))
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            log = _output(library, program, "ProgramLog").decode(errors="replace")
            raise RuntimeError(f"NVRTC {version} cannot compile fused.cu with {' '.join(options)}:\n{log}")
        return _output(library, program, "CUBIN"), _output(library, program, "PTX").rstrip(b"\0").decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _output(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    nbytes = ctypes.c_size_t()
    _require(library, library[f"nvrtcGet{what}Size"](program, ctypes.byref(nbytes)))
    output = ctypes.create_string_buffer(nbytes.value)
    _require(library, library[f"nvrtcGet{what}"](program, output))
    return output.raw


def _require(library: ctypes.CDLL, result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC failed: {library.nvrtcGetErrorString(result).decode()}")
