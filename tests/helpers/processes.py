"""What /proc says about processes that may end at any moment."""

import os
from pathlib import Path

# What opening and reading raise about a process that has ended before the one, or between the two.
ENDED = (FileNotFoundError, ProcessLookupError)


def stat_of(pid: int) -> list[str]:
    """The process's state, parent, process group and what follows in /proc; ["Z", "0", "0"] if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except ENDED:
        return ["Z", "0", "0"]


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie has ended, even if its parent has not asked for its status."""
    return stat_of(pid)[0] != "Z"


def files_of_all(name: str) -> dict[int, bytes]:
    """By process id: the file of that name of each process that this one may look at."""
    found = {}
    for path in Path("/proc").glob(f"[0-9]*/{name}"):
        try:
            found[int(path.parent.name)] = path.read_bytes()
        except (*ENDED, PermissionError):
            continue
    return found


def with_variable(name: str, value: str) -> dict[int, tuple[str, dict[str, str]]]:
    """By process id: the command and the environment of each process that was started with that variable, but this one
    and the two that multiprocessing keeps for it."""
    found, commands = {}, files_of_all("cmdline")
    for pid, content in files_of_all("environ").items():
        variables = dict(each.split("=", 1) for each in content.decode(errors="replace").split("\0") if "=" in each)
        if variables.get(name) == value and pid != os.getpid() and is_running(pid):
            command = commands.get(pid, b"").decode(errors="replace").replace("\0", " ").strip()
            if not (int(stat_of(pid)[1]) == os.getpid() and "from multiprocessing." in command):
                found[pid] = command, variables
    return found


def scheduled() -> dict[int, tuple[float, float]]:
    """By process id, of this process and what it has started: seconds in which its main thread has run, and in which it
    was ready to run and other threads had the cores. Empty where the kernel does not count."""
    found, left = {}, [os.getpid()]
    while left:
        pid = left.pop()
        try:
            ran, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
            left += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except ENDED:
            continue
        found[pid] = int(ran) / 1e9, int(waited) / 1e9
    return found


def listening_ports() -> set[int]:
    """The TCP ports on which this process listens."""
    sockets = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            sockets.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the descriptor with which they were listed
            continue
    tables = [Path("/proc/self/net", name) for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables if table.exists() for row in table.read_text().splitlines()[1:]]
    listens = "0A"
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == listens and f"socket:[{row[9]}]" in sockets}


def members(group: int) -> list[int]:
    """The processes of a process group that run."""
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if int(stat_of(pid)[2]) == group and is_running(pid)]
