"""The ranks that a command starts on this machine, over gloo."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker

import torch.distributed as dist
import torch.multiprocessing as mp

import fusedcomm.native  # noqa: F401  a missing extension is said here, not by each rank
from fusedcomm.ranks.own_group import served_store

REPORTED = 2
"""Exit status of a rank that has printed why it failed."""


def run(command: str, num_ranks: int, function: Callable[..., int], *arguments: object) -> int:
    """Calls `function` with `arguments` on ranks that it starts here, in a default process group over gloo.

    Args:
        command: the command's name, for messages.
        function: returns the rank's exit status; REPORTED if it has printed an error.

    Returns:
        The command's exit status. Errors have been printed.

    Raises:
        KeyboardInterrupt: by Ctrl-C. All ranks have been ended.
    """
    # This process serves the store, on a free port that the system chooses, so no other program can take it first.
    store = served_store("127.0.0.1")
    # It would say which process it ends, beside the error of the rank that failed.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    ranks = None
    try:
        with interrupts_later():
            ranks = mp.spawn(_run_rank, (store.port, num_ranks, function, arguments), num_ranks, join=False)
        while not ranks.join():
            pass
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        if getattr(error, "signal_name", None) == "SIGINT":
            raise KeyboardInterrupt from None
        if getattr(error, "exit_code", None) == REPORTED:
            return REPORTED
        print(f"fusedcomm {command}: rank {error.error_index} failed; the others were ended: {error}", file=sys.stderr)
        return 1
    finally:
        for process in ranks.processes if ranks else ():
            process.kill()
            process.join()
    return 0


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Delays SIGINT until the block ends. A process that starts within it delays SIGINT until it says otherwise: a
    Ctrl-C while it imports would print a traceback for each rank."""
    resource_tracker.ensure_running()  # with the first process it would be started here, and end the delay
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_rank(rank: int, port: int, num_ranks: int, function: Callable[..., int], arguments: tuple) -> None:
    # The rank ends at once, also if its threads wait for other ranks. The process that started it says so.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.environ["LOCAL_WORLD_SIZE"] = str(num_ranks)
    if sys.platform == "linux":
        # Without this, gloo looks up this machine's host name, which does not always resolve.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    status = function(*arguments)
    if status:
        sys.exit(status)
