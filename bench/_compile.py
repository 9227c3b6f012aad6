"""Compiles what tests/devices/test_cuda.py needs, on all cores, for Triton to find in its cache: its tests compile one
kernel after another, every rank all of them.

    python bench/_compile.py                     # for this machine's GPU
    python bench/_compile.py --capability 90     # for one that is not there
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time

import torch
from lib.common import REPOSITORY

from fusedcomm.devices import compilers, cuda
from fusedcomm.native import _C


def variants() -> "list[_C.KernelKey]":
    """Every kernel of every configuration and dtype there, each once."""
    sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("devices", "helpers")]
    from test_cuda import CASES, CONFIGS

    found: "dict[_C.KernelKey, None]" = {}
    for name, world_size, dtype in CASES:
        found.update(dict.fromkeys(cuda.kernel_variants(CONFIGS[name], world_size, [dtype])))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, help="of the GPU, e.g. 90 (this machine's)")
    parser.add_argument("--most", type=int, help="only so many kernels (all)")
    arguments = parser.parse_args()
    capability = arguments.capability or cuda.check_capability(torch.device("cuda", 0))
    compile = compilers.choose().compile
    chosen, began = variants()[: arguments.most], time.monotonic()
    workers = min(os.cpu_count() or 1, len(chosen))
    # Not forked: a child must not have this process's CUDA.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(compile, variant, capability) for variant in chosen]
        for future in concurrent.futures.as_completed(done):
            future.result()
    print(f"{len(done)} kernels for sm_{capability} in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
