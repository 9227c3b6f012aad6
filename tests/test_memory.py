"""How much memory a process may use: the machine's, or the lowest limit of its control groups."""

import os

import pytest

from fusedcomm import memory

MIB = 1 << 20
MEMINFO = "MemTotal:        8192 kB\nMemFree:          100 kB\nMemAvailable:    4096 kB\nHugePages_Total:       0\n"
V1 = "9223372036854771712"  # what version 1 has where there is no limit

# Files of a system by path, and the MiB in all and free. The machine alone has 8 MiB, 4 of them available.
SYSTEMS = {
    "no control groups": ({}, 8, 4),
    "version 2, no limit": (
        {"proc/self/cgroup": "0::/job\n", "sys/fs/cgroup/job/memory.max": "max\n"},
        8,
        4,
    ),
    "version 2, a limit of the parent": (
        {
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/step/memory.max": "max\n",
            "sys/fs/cgroup/job/memory.max": f"{6 * MIB}\n",
            "sys/fs/cgroup/job/memory.current": f"{5 * MIB}\n",
            "sys/fs/cgroup/job/memory.stat": f"anon 1\ninactive_file {2 * MIB}\n",
        },
        6,
        3,
    ),
    "version 2, more in use than the limit": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{2 * MIB}\n",
            "sys/fs/cgroup/memory.current": f"{3 * MIB}\n",
        },
        2,
        0,
    ),
    "version 1, in a container that the host names": (
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/0123\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{3 * MIB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * MIB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {MIB}\n",
        },
        3,
        2,
    ),
    "version 1, no limit": (
        {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": V1},
        8,
        4,
    ),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_lowest_limit_counts(tmp_path, system):
    files, total, free = SYSTEMS[system]
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory.total_nbytes(tmp_path) == total * MIB
    assert memory.free_nbytes(tmp_path) == free * MIB


def test_a_system_that_tells_nothing_has_what_sysconf_says(tmp_path):
    assert memory.total_nbytes(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory.free_nbytes(tmp_path) is None


def test_this_machine_has_memory():
    assert 0 < memory.free_nbytes() <= memory.total_nbytes()
