"""Threads that the system does not start."""

import sys

import pytest
from scripts import python

SCRIPT = """
import ctypes, glob
from fusedcomm.native import _C

libc, usual, endless = ctypes.CDLL(None), ctypes.create_string_buffer(64), ctypes.create_string_buffer(64)
for attributes in (usual, endless):
    assert libc.pthread_getattr_default_np(attributes) == 0
assert libc.pthread_attr_setstacksize(endless, ctypes.c_size_t(1 << 48)) == 0  # more than the address space
assert libc.pthread_setattr_default_np(endless) == 0
try:
    _C.Codec("auto", 2)
except RuntimeError as error:
    print(error)
assert libc.pthread_setattr_default_np(usual) == 0
codec = _C.Codec("auto", 2)
print([name for path in glob.glob("/proc/self/task/*/comm") if (name := open(path).read().strip()) == "codec-pool"])
"""


@pytest.mark.check
@pytest.mark.skipif(sys.platform != "linux", reason="sets glibc's default size of stacks")
def test_the_error_says_which_thread_and_how_much_was_asked_for():
    done = python("-c", SCRIPT, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    error, names = done.stdout.splitlines()
    assert error == (
        "fusedcomm: the system did not start the thread codec-pool, which takes 268435456 MiB of address space for its "
        "stack. This process has 1 thread(s). Raise the limit of processes (ulimit -u, pids.max) or of memory (ulimit "
        "-v): Resource temporarily unavailable"
    )
    assert names == "['codec-pool']"
