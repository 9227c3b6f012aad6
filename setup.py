"""Builds ``fusedcomm._C`` with a C++ compiler and ninja, against the installed torch.

Use ``CppExtension``, never ``CUDAExtension``: one build serves CPU and GPU, and no CUDA toolkit is needed.
"""

import re
from functools import cache
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# There is no -std: torch adds the one that its headers need.
# -O3: with -O2 the codec's rotated kernels take twice as long, and a call of the hook takes 7% longer.
# -ffp-contract=off: a fused multiply-add rounds once where the reference rounds twice, and the bytes must match.
COMPILE_FLAGS = [
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
    # GCC collects garbage only above this heap size, in KiB. Torch's headers leave none to collect, so a build takes a
    # tenth less time.
    "--param",
    "ggc-min-heapsize=1048576",
]

# Through this private member csrc/frontends/ddp/hook.cpp takes a hook away from DDP's reducer. With a torch that has no
# such member, a reducer keeps its hook for life.
REDUCER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/reducer.hpp"
if "std::unique_ptr<CommHookInterface> comm_hook_;" in REDUCER.read_text():
    COMPILE_FLAGS.append("-DFUSEDCOMM_REDUCER_HAS_COMM_HOOK")

CSRC = Path("csrc").absolute()
UNITS = Path("build/units")


@cache
def uses_torch(file: Path) -> bool:
    """Whether the file includes a header of torch or pybind11, directly or through a header in csrc/."""
    names = re.findall(r'^#include [<"](.+)[>"]', file.read_text(), re.MULTILINE)
    if any(name.startswith(("ATen/", "c10/", "pybind11/", "torch/")) for name in names):
        return True
    return any(uses_torch(CSRC / name) for name in names if (CSRC / name).is_file())


def write_unit(name: str, files: list[Path]) -> str:
    """Writes a source file that includes `files` and returns its path. A file with the same text is not touched."""
    unit = UNITS / f"{name}.cpp"
    text = "".join(f'#include "{file.relative_to(CSRC)}"\n' for file in files)
    if not unit.is_file() or unit.read_text() != text:
        unit.parent.mkdir(parents=True, exist_ok=True)
        unit.write_text(text)
    return str(unit)


def sources() -> list[str]:
    """The source files to compile: files that use torch in two units, the others one by one.

    Reading torch's headers takes longer than compiling what one file adds to them. They are therefore read twice, once
    for each of two cores, and not once for each file. The files of a unit share their anonymous namespaces: two of them
    must not define the same name there.
    """
    files = sorted(CSRC.rglob("*.cpp"))
    units: dict[str, list[Path]] = {"bindings": [], "torch": []}
    for file in filter(uses_torch, files):
        units["bindings" if file.is_relative_to(CSRC / "bindings") else "torch"].append(file)
    # The units come first, because they take longest.
    return [write_unit(name, unit) for name, unit in units.items()] + [
        str(file.relative_to(CSRC.parent)) for file in files if not uses_torch(file)
    ]


setup(
    ext_modules=[
        CppExtension(
            "fusedcomm._C",
            include_dirs=[str(CSRC)],
            sources=sources(),
            depends=sorted(str(p) for p in Path("csrc").rglob("*") if p.suffix in (".cpp", ".h")),
            extra_compile_args=COMPILE_FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
    # pip's editable build would put object files into a folder that it removes. The next build would compile all again.
    options={"build_ext": {"build_temp": "build/objects"}},
)
