"""Builds ``fusedcomm._C`` with a C++ compiler and ninja, against the installed torch.

Use ``CppExtension``, never ``CUDAExtension``: one build serves CPU and GPU, and no CUDA toolkit is needed.
"""

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

import setuptools

HOW_TO_INSTALL = """To install fusedcomm, in this order, into the Python environment that you train in:
    pip install torch                           # or the build of torch that you want; 2.11 or later
    pip install "setuptools>=77" wheel ninja
    pip install --no-build-isolation .          # without the option pip builds where there is no torch"""


def refuse(problem: str) -> None:
    """Ends the build with the problem and what to do, which pip prints."""
    sys.exit(f"fusedcomm: {problem}.\n{HOW_TO_INSTALL}")


if sys.platform != "linux":
    sys.exit(
        f"fusedcomm builds on Linux only: its C++ code makes calls of the Linux kernel, and this is {sys.platform}. "
        "Use a container or a virtual machine with Linux; on Windows, WSL 2"
    )
try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available
except (ImportError, OSError) as error:
    refuse(
        f"it is built against the torch that will load it, and Python ({sys.executable}) cannot import torch here: "
        f"{error}"
    )

sys.path.insert(0, str(Path(__file__).parent))
sys.dont_write_bytecode = True  # the build leaves no __pycache__ in the checkout
from fusedcomm import memory, version  # noqa: E402  (these import nothing but the standard library)
from fusedcomm.ranks import torch_groups  # noqa: E402  (imports torch, too)

if tuple(map(int, version.minor(torch.__version__).split("."))) < (2, 11):
    refuse(f"torch 2.11 or later is needed, and Python ({sys.executable}) has {torch.__version__}")
if int(setuptools.__version__.split(".")[0]) < 77:
    refuse(f"setuptools 77 or later is needed, and Python ({sys.executable}) has {setuptools.__version__}")

# There is no -std: torch adds the one that its headers need.
# -O3: with -O2 a call of the hook takes 7% longer.
# -ffp-contract=off: a fused multiply-add rounds once where the reference rounds twice, and the bytes must match.
COMPILE_FLAGS = [
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    "-DAT_PER_OPERATOR_HEADERS",
    # GCC collects garbage only above this heap size, in KiB. Torch's headers leave none to collect, so a build takes a
    # tenth less time.
    "--param",
    "ggc-min-heapsize=1048576",
]

TORCH_INCLUDE = Path(torch.__file__).parent / "include"
if lacking := torch_groups.missing(TORCH_INCLUDE):
    refuse(
        f"torch {torch.__version__} lacks what fusedcomm relies on, in its headers torch/csrc/distributed/c10d: "
        + "; ".join(lacking)
    )
header, member, _ = torch_groups.COMM_HOOK
if torch_groups.declares(TORCH_INCLUDE, header, member):  # what csrc/frontends/ddp/hook.cpp asks
    COMPILE_FLAGS.append("-DFUSEDCOMM_REDUCER_HAS_COMM_HOOK")

CSRC = Path("csrc").absolute()
UNITS = Path("build/units")
# Headers that stand in for torch's: see write_narrow_headers().
NARROW = UNITS / "headers"


def write(file: Path, text: str) -> str:
    """Writes a file and returns its path. One that has this text already is not touched."""
    if not file.is_file() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return str(file)


def write_narrow_headers() -> None:
    """Writes headers that stand in for the two by which ATen.h declares all of torch's 2,000 operators: they declare
    those that csrc/ calls. With AT_PER_OPERATOR_HEADERS torch's other headers include what they need. This saves a
    third of the time that reading torch's headers takes."""
    text = "".join(file.read_text() for file in CSRC.rglob("*") if file.suffix in (".cpp", ".h"))
    called = sorted(set(re.findall(r"\bat::(\w+)\(", text)))
    names = [name for name in called if (TORCH_INCLUDE / f"ATen/ops/{name}.h").is_file()]
    includes = "".join(f"#include <ATen/ops/{name}.h>\n" for name in names)
    write(NARROW / "ATen/Functions.h", f"#pragma once\n{includes}")
    write(NARROW / "ATen/NativeFunctions.h", "#pragma once\n")


@cache
def uses_torch(file: Path) -> bool:
    """Whether the file includes a header of torch or pybind11, directly or through a header in csrc/."""
    names = re.findall(r'^#include [<"](.+)[>"]', file.read_text(), re.MULTILINE)
    if any(name.startswith(("ATen/", "c10/", "pybind11/", "torch/")) for name in names):
        return True
    return any(uses_torch(CSRC / name) for name in names if (CSRC / name).is_file())


def unit_of(file: Path) -> str | None:
    """The unit that includes a source file; None for one that is compiled by itself."""
    folder = file.relative_to(CSRC).parts[0]
    if uses_torch(file):
        # Setuptools sorts sources: these, which take longest, are to come first.
        return "0_bindings" if folder == "bindings" else "0_torch"
    return None if folder == "codec" else folder


def sources() -> list[str]:
    """The source files to compile: two units of files that use torch, one of each folder's others, and the codec's
    files one by one.

    Reading headers takes longer than compiling what one file adds to them. Torch's are therefore read twice, once for
    each of two cores, and not once for each file. The files of a unit share their anonymous namespaces: two of them
    must not define the same name there.
    """
    write_narrow_headers()
    units: dict[str, list[Path]] = {}
    alone = []
    for file in sorted(CSRC.rglob("*.cpp")):
        if unit := unit_of(file):
            units.setdefault(unit, []).append(file)
        else:
            alone.append(str(file.relative_to(CSRC.parent)))
    for path in UNITS.glob("*.cpp"):
        if path.stem not in units:
            path.unlink()  # of sources that are gone
    return [
        write(UNITS / f"{unit}.cpp", "".join(f'#include "{file.relative_to(CSRC)}"\n' for file in files))
        for unit, files in units.items()
    ] + alone


# The memory that compiling the largest unit may need. GCC 12 needs 2.4 GiB for it; other compilers were not measured.
UNIT_NBYTES = 3 << 30


def shared_libstdcxx(compiler: str) -> list[str]:
    """Options by which the extension uses the same libstdc++ as torch, also where the compiler finds only a static one,
    or is told to use it. A second copy numbers the facets of a locale in another order, and the first number that is
    written to a stream ends the process."""
    command = [*shlex.split(compiler), "-print-file-name=libstdc++.so.6"]
    found = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return [found if Path(found).is_absolute() else "-lstdc++"]


def num_jobs() -> int:
    """Units to compile side by side: as many as there are cores, or as fit into the memory that is free."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free_nbytes = memory.free_nbytes()
    jobs = cores if free_nbytes is None else max(1, min(cores, free_nbytes // UNIT_NBYTES))
    free = "unknown" if free_nbytes is None else f"{free_nbytes / (1 << 30):.1f} GiB"
    print(
        f"fusedcomm: compiles for torch {torch.__version__}, {jobs} at a time ({cores} cores; free memory {free}, and "
        f"one compiler needs up to {UNIT_NBYTES / (1 << 30):g} GiB). The variable MAX_JOBS sets another number.",
        flush=True,
    )
    return jobs


class build_ext(BuildExtension):
    """Checks what compiling needs. Writes beside the extension which torch it was built for, and its stub.

    Setuptools looks options up by the name of this class.
    """

    def initialize_options(self) -> None:
        super().initialize_options()
        # A folder that stays, so that the next build compiles only what has changed.
        self.build_temp = "build/objects"

    def run(self) -> None:
        super().run()
        extension = Path(self.get_ext_fullpath("fusedcomm._C"))
        if b"libstdc++.so" not in extension.read_bytes():
            sys.exit(
                "fusedcomm: the compiler has linked its own copy of libstdc++ into the extension, which would end the "
                "process when it meets torch's. Set CXX to a compiler that finds libstdc++.so.6"
            )
        extension.with_name(version.BUILT_FOR).write_text(torch.__version__ + "\n")
        subprocess.run([sys.executable, str(CSRC / "bindings" / "stubs.py"), str(extension)], check=True)

    def build_extensions(self) -> None:
        compiler = os.environ.get("CXX", "").strip() or "c++"
        if shutil.which(shlex.split(compiler)[0]) is None:
            sys.exit(f"fusedcomm: no C++ compiler {compiler}. Install one (apt: g++; dnf: gcc-c++), or set CXX")
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            sys.exit(f"fusedcomm: {sys.executable} has no Python.h. Install it (apt: python3-dev; dnf: python3-devel)")
        if not is_ninja_available():
            refuse("ninja is needed and not found")
        self.extensions[0].extra_link_args += shared_libstdcxx(compiler)
        if not os.environ.get("MAX_JOBS"):
            os.environ["MAX_JOBS"] = str(num_jobs())
        super().build_extensions()


# Everything else that setuptools writes goes into a folder that is removed: nothing of an earlier build can get into a
# wheel, and nothing but build/ stays in the checkout.
SCRATCH = tempfile.mkdtemp(prefix="fusedcomm-build-")
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

setuptools.setup(
    # A wheel runs with the torch that it was built for: the extension uses C++ classes of torch, which change between
    # minor versions. So pip refuses another minor version, and fusedcomm/native.py does, too. The build may be one for
    # CPU or for any CUDA.
    install_requires=[f"torch=={version.minor(torch.__version__)}.*"],
    ext_modules=[
        CppExtension(
            "fusedcomm._C",
            include_dirs=[str(NARROW.absolute()), str(CSRC)],
            sources=sources(),
            depends=sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in (".cpp", ".h")),
            extra_compile_args=COMPILE_FLAGS,
        )
    ],
    cmdclass={"build_ext": build_ext},
    options={
        "build": {"build_lib": f"{SCRATCH}/lib"},
        "bdist_wheel": {"bdist_dir": f"{SCRATCH}/wheel"},
        "egg_info": {"egg_base": SCRATCH},
    },
)
