"""``fusedcomm doctor``: shows what this machine has, and what fusedcomm does on it.

It has to run where the extension is not built or torch is broken, so it imports everything late.
"""

import importlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import subprocess
import types

import fusedcomm
from fusedcomm.ranks import own_address


def main() -> int:
    """Prints the report. Returns 1 if the extension cannot be used, else 0."""
    extension_error = _extension_error()
    extension = "cannot be used, see below" if extension_error else _extension()
    _print_lines("This machine", [*_machine(), ("extension", extension)])
    print()
    _print_lines("What fusedcomm does here", _verdict(extension_error))
    return 1 if extension_error else 0


def _print_lines(title: str, lines: list[tuple[str, str]]) -> None:
    print(title)
    for name, value in lines:
        print(f"  {name:<12} {value}")


# ---- this machine


def _machine() -> list[tuple[str, str]]:
    return [
        ("fusedcomm", fusedcomm.__version__),
        ("python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", _torch()),
        ("backends", _backends()),
        ("cores", _cores()),
        ("compiler", _compiler()),
        ("CUDA", _cuda()),
        ("triton", _version_of("triton")),
        ("addresses", f"{', '.join(own_address.candidates())}, of {own_address.host_name()}"),
    ]


def _torch() -> str:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        return f"cannot be imported: {error}"
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return f"{torch.__version__}, {build}"


def _backends() -> str:
    try:
        dist = importlib.import_module("torch.distributed")
    except (ImportError, OSError):
        return "unknown without torch"
    if not dist.is_available():
        return "none: this torch is built without torch.distributed"
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in there.items())


def _cores() -> str:
    total = os.cpu_count()
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else total
    return f"{usable} of {total} usable by this process"


def _compiler() -> str:
    command = os.environ.get("CXX", "").strip() or "c++"
    if shutil.which(shlex.split(command)[0]) is None:
        return f"{command}: not found (only needed to build; apt: g++, dnf: gcc-c++)"
    shown = subprocess.run([*shlex.split(command), "--version"], capture_output=True, text=True)
    return f"{command}: {(shown.stdout or shown.stderr).partition(os.linesep)[0]}"


def _cuda() -> str:
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError):
        return "unknown without torch"
    if not torch.cuda.is_available():
        return "no device that this torch can use"
    return ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))


def _version_of(package: str) -> str:
    """Its version, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- what fusedcomm does here


def _extension_error() -> str | None:
    """Why the extension cannot be used, and what to change; None if it can be used."""
    try:
        from fusedcomm import env
        from fusedcomm.native import _C
    except (ImportError, OSError) as error:
        return str(error)
    isas = _C.available_isas()
    if env.isa() not in ("auto", *isas):
        return f"{env.ISA}={env.isa()} cannot run on this machine: unset it, or use one of {', '.join(isas)}"
    return None


def _extension() -> str:
    from fusedcomm import env, version
    from fusedcomm.native import _C

    isas = _C.available_isas()
    chosen = isas[-1] if env.isa() == "auto" else env.isa()
    built_for = version.built_for()
    built = f"built for torch {built_for}" if built_for else "built"
    return f"{built}; instruction sets {', '.join(isas)}; uses {chosen}"


def _verdict(extension_error: str | None) -> list[tuple[str, str]]:
    if extension_error:
        return [("nothing yet", extension_error)]
    dist = importlib.import_module("torch.distributed")
    if dist.is_available() and dist.is_gloo_available():
        cpu = f"supported over gloo; wires {', '.join(fusedcomm.WIRES)}"
    else:
        cpu = "not supported: this torch has no gloo backend"
    return [("CPU", cpu), ("CUDA", _cuda_verdict(dist)), ("kernels", _kernels_verdict()), *_streams_verdict()]


def _kernels_verdict() -> str:
    """What compiles the kernels for a GPU. Does not need a GPU."""
    from fusedcomm.devices import cuda

    try:
        name, _ = cuda.triton()
    except RuntimeError as error:
        return f"none for CUDA: {error}"
    return f"on CUDA by {name}"


def _streams_verdict() -> list[tuple[str, str]]:
    """A warning if CUDA has too few queues for the streams to run side by side; else empty."""
    from fusedcomm import env
    from fusedcomm.devices import cuda

    queues = env.cuda_queues()
    if queues is None or queues >= cuda.NUM_STREAMS_BY_HOST:
        return []
    where = "on CUDA" if queues < cuda.NUM_STREAMS else "on CUDA, with sums on two levels,"
    what = "wait for each other" if queues == 1 else f"share {queues} queues, and wait for each other there"
    told = f"{where} the backward pass and fusedcomm's streams {what}, so little communication is overlapped"
    cure = (
        f"Unset it (then 8 queues), or set {cuda.NUM_STREAMS} or more, {cuda.NUM_STREAMS_BY_HOST} with sums on two "
        "levels, unless tensor parallelism needs this value"
    )
    return [("streams", f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: {told}. {cure}")]


def _cuda_verdict(dist: types.ModuleType) -> str:
    """Whether CUDA is supported here, by the checks that attach makes, except compiling."""
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return "not used: this torch finds no CUDA device"
    if not (dist.is_available() and dist.is_nccl_available()):
        return "not supported: this torch has no NCCL backend"
    from fusedcomm.devices import cuda
    from fusedcomm.native import _C

    try:
        _C.CudaDriver(cuda.DRIVER)
        capabilities = {cuda.check_capability(torch.device("cuda", i)) for i in range(torch.cuda.device_count())}
        compiler, _ = cuda.triton()
    except RuntimeError as error:
        return f"not supported: {error}"
    names = ", ".join(f"sm_{capability}" for capability in sorted(capabilities))
    has = f"{compiler} compiles for {names}; wires {', '.join(fusedcomm.WIRES)}"
    return f"over NCCL, tested on one H100 (in a checkout, `make gpu` tests it on this one); {has}"
