"""What /proc says about processes that may end at any moment."""

import os
from pathlib import Path

# What opening and reading raise about a process that has ended before the one, or between the two.
ENDED = (FileNotFoundError, ProcessLookupError)


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie has ended, even if its parent has not asked for its status."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ENDED:
        return False


def command_lines() -> list[bytes]:
    """The command lines of the processes that this one may look at."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes())
        except (*ENDED, PermissionError):
            continue
    return lines


def members(group: int) -> list[int]:
    """The processes of a process group that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            is_member = os.getpgid(int(path.name)) == group
        except ProcessLookupError:
            continue
        if is_member and is_running(int(path.name)):
            found.append(int(path.name))
    return found
