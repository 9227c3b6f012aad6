"""How much memory a process may use here: the machine's, or less where a control group (a container, a batch job) has a
limit. setup.py uses it, too, so it imports nothing but the standard library."""

import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def total_nbytes(root: Path = _ROOT) -> int | None:
    """Bytes of the machine's memory, or the lowest limit of a control group; None if the system does not tell.

    Args:
        root: the folder that holds proc/ and sys/.
    """
    return min([*_physical_nbytes(root), *(limit for limit, _ in _limits(root))], default=None)


def free_nbytes(root: Path = _ROOT) -> int | None:
    """Bytes that can still be allocated without swapping; None if the system does not tell. `root` as above."""
    available = [_lines(root / "proc/meminfo").get("MemAvailable", 0) * 1024]
    return min([*filter(None, available), *(max(0, limit - used) for limit, used in _limits(root))], default=None)


def _physical_nbytes(root: Path) -> list[int]:
    """The machine's memory; empty if the system does not tell."""
    total = _lines(root / "proc/meminfo").get("MemTotal")
    if total is not None:
        return [total * 1024]
    try:
        return [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    except (AttributeError, OSError, ValueError):
        return []


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, bytes in use) of each control group that this process is in and that has a limit.

    Pages of files that the kernel can drop at once do not count as used.
    """
    # Version 2 of control groups, then version 1: the mount, and the files' and the counter's names.
    versions = {
        "": ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        "memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in set(controllers.split(",")) & versions.keys():
            mount, limit, used, droppable = versions[controller]
            # In a container the group may be named as the host sees it. What is mounted is then the container's group.
            path = Path(group.lstrip("/"))
            for folder in (root / mount / part for part in (path, *path.parents)):
                text = _text(folder / limit).strip()
                if text.isdigit():
                    in_use = int(_text(folder / used) or 0) - _lines(folder / "memory.stat").get(droppable, 0)
                    yield int(text), max(0, in_use)


def _lines(path: Path) -> dict[str, int]:
    """The numbers of a file with lines such as "MemTotal: 1024 kB", by name; empty if it cannot be read."""
    words = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {name: int(number) for name, number, *_ in filter(lambda found: len(found) > 1, words) if number.isdigit()}


def _text(path: Path) -> str:
    """The file's text; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
