"""Compiles the kernels that tests/devices/test_cuda.py needs, on all cores, into Triton's cache. The tests alone would
compile one kernel after another, and each rank would compile all of them.

    python bench/_compile.py                     # for this machine's GPU
    python bench/_compile.py --capability 90     # for a GPU that this machine does not have
"""

import argparse
import concurrent.futures
import multiprocessing
import os
import sys
import time

import torch
from lib.common import REPOSITORY

from fusedcomm.devices import cuda
from fusedcomm.native import _C


def variants() -> "list[_C.KernelKey]":
    """Every kernel of every configuration and dtype in test_cuda.py, each once."""
    sys.path[:0] = [str(REPOSITORY / "tests" / folder) for folder in ("devices", "helpers")]
    from test_cuda import CASES, CONFIGS

    found: "dict[_C.KernelKey, None]" = {}
    for name, world_size, dtype in CASES:
        found.update(dict.fromkeys(cuda.kernel_variants(CONFIGS[name], world_size, [dtype])))
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, help="the GPU's, 90 for sm_90 (default: this machine's)")
    parser.add_argument("--most", type=int, help="compile at most this many kernels (default: all)")
    arguments = parser.parse_args()
    capability = arguments.capability or cuda.check_capability(torch.device("cuda", 0))
    _, compile = cuda.triton()
    chosen, began = variants()[: arguments.most], time.monotonic()
    workers = min(os.cpu_count() or 1, len(chosen))
    # The workers are spawned, since CUDA does not work in a forked process.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        done = [pool.submit(compile, variant, capability) for variant in chosen]
        for future in concurrent.futures.as_completed(done):
            future.result()
    print(f"{len(done)} kernels for sm_{capability} in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
