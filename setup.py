"""Builds ``fusedcomm._C`` with a C++ compiler and ninja, against the torch that is installed.

``CppExtension``, never ``CUDAExtension``: one build serves CPU and GPU, and no CUDA toolkit is asked for.
"""

from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

# No -std: torch adds the one its own headers need.
# -ffp-contract=off: a fused multiply-add rounds once where the reference rounds twice, and the bytes must match.
COMPILE_FLAGS = [
    "-O3",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fvisibility=hidden",
    "-Wall",
    "-Wno-unknown-pragmas",
]

# DDP's reducer keeps its hook for life, unless this private member of it is there (csrc/frontends/ddp/hook.cpp).
REDUCER = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d/reducer.hpp"
if "std::unique_ptr<CommHookInterface> comm_hook_;" in REDUCER.read_text():
    COMPILE_FLAGS.append("-DFUSEDCOMM_REDUCER_HAS_COMM_HOOK")

setup(
    ext_modules=[
        CppExtension(
            "fusedcomm._C",
            include_dirs=[str(Path("csrc").absolute())],
            sources=sorted(str(p) for p in Path("csrc").rglob("*.cpp")),
            depends=sorted(str(p) for p in Path("csrc").rglob("*.h")),
            extra_compile_args=COMPILE_FLAGS,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(use_ninja=True)},
)
