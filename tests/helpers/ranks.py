"""Real ranks for tests: processes that stay alive between tests. Each call makes a new process group of them.

Starting Python and importing torch takes seconds; a new process group takes milliseconds. Ranks are forked from a
server that has imported torch but never used it, so ranks that a test has killed are replaced quickly.
"""

import contextlib
import datetime
import gc
import multiprocessing as mp
import os
import tempfile
import time
import traceback
import warnings

from patience import HANG_S

GROUP_TIMEOUT_S = HANG_S / 2
CALL_TIMEOUT_S = HANG_S


class RankError(AssertionError):
    """A rank raised; the text is its traceback."""


# Lets several NCCL ranks share one GPU. NCCL up to 2.29 allows it if each process has its own host name, since it then
# treats them as different machines; later versions have a switch. The bytes go through loopback sockets.
ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


# Modules that the server imports before it forks ranks. DistributedDataParallel imports torch._dynamo when it is first
# constructed, which would take every rank two seconds.
PRELOADED = [
    *("torch", "torch.distributed", "torch.nn.parallel", "torch.testing", "torch._dynamo", "numpy", "pytest"),
    *("fusedcomm.reducer.reducer", "fusedcomm.local_steps.local_steps"),
]


def forkserver() -> mp.context.ForkServerContext:
    """Starts the processes of all tests. A process has one server, and what its first user preloads is all it has."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _serve(pipe, index: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # the server's environment dates from when the server was started
    # A rank uses one core; more threads would only make ranks wait for each other.
    os.environ.update(OMP_NUM_THREADS="1", FUSEDCOMM_QUIET="1", NCCL_HOSTID=f"rank {index}", **ONE_GPU)
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # a collection then takes no time for the modules: without it, a quarter of a second
    while (call := pipe.recv()) is not None:
        try:
            pipe.send(("value", _run(*call)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


def _run(function, rank, world_size, store_path, backend, args):
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    store = dist.FileStore(store_path, world_size)
    device = torch.device("cuda", 0) if "nccl" in backend else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device)
    if backend == "gloo":
        # A function may leave the group at once. A rank that is still connecting would treat that as a crash.
        dist.barrier()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(rank, world_size, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def nothing(rank: int, world_size: int) -> None:
    """What a call does that only starts ranks."""


class Ranks:
    """A pool of up to `num_ranks` processes, each started for the first call that needs it. ``run(function, *args)``
    calls ``function(rank, world_size, *args)`` on the first `world_size` of them and returns their results in rank
    order. The function must be importable.

    Raises RankError, with the tracebacks of the ranks that failed."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        self._pipes, self.processes = [], []

    def _grow(self, num_ranks: int) -> None:
        for index in range(len(self.processes), num_ranks):
            ours, theirs = mp.Pipe()
            process = forkserver().Process(target=_serve, args=(theirs, index, dict(os.environ)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def pid_of(self, rank: int) -> int:
        """The process of that rank in the next call."""
        self._grow(rank + 1)
        return self.processes[rank].pid

    def run(
        self, function, *args, world_size: int | None = None, backend: str = "gloo", leaves_waiting: bool = False
    ) -> list:
        """leaves_waiting: the function leaves a collective of the group that not all ranks call. Torch would wait for
        it, until the group's timeout, wherever the group is collected later. All ranks are restarted."""
        results = self.outcomes(function, *args, world_size=world_size, backend=backend)
        if leaves_waiting:
            self._kill()
            self._start()
        errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(results) if kind != "value"]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in results]

    def outcomes(
        self, function, *args, world_size: int | None = None, lost: int | None = None, backend: str = "gloo"
    ) -> list:
        """Like `run`, but returns errors instead of raising them. A rank's outcome is ("value", result), ("error",
        traceback) or ("silent", reason).

        `lost`: a rank that the function kills or stops. Its outcome is ("lost", None) without a wait, and all ranks are
        restarted afterwards.
        """
        world_size = world_size or self.num_ranks
        self._grow(world_size)
        results, is_complete = [], False
        try:
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a watch may still look there
                store_path = os.path.join(folder, "store")
                for rank in range(world_size):
                    self._pipes[rank].send((function, rank, world_size, store_path, backend, args))
                for rank in range(world_size):
                    results.append(("lost", None) if rank == lost else self._receive(rank))
            is_complete = lost is None and all(kind != "silent" for kind, _ in results)
        finally:  # even if the test's own timeout ends the wait
            if not is_complete:
                # A late answer of these ranks would be mistaken for the answer to the next call.
                self._kill()
                self._start()
        return results

    def _receive(self, rank: int) -> tuple[str, object]:
        if not self._pipes[rank].poll(CALL_TIMEOUT_S):
            return ("silent", f"no answer within {CALL_TIMEOUT_S} s")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(5)
            return ("silent", f"its process ended, with exit code {self.processes[rank].exitcode}")

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        until = time.monotonic() + 5
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        self._kill()

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
