"""Real ranks for tests: processes that stay alive between tests, joined anew for each call.

Starting Python and importing torch costs seconds; a fresh process group costs milliseconds. Ranks are forked off a
server that has imported torch and never used it, so that those a test has killed are soon replaced.
"""

import contextlib
import datetime
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


# Several NCCL ranks on one GPU: NCCL up to 2.29 takes processes with host names of their own for different machines,
# later versions have a switch. The bytes go through loopback sockets.
ONE_GPU = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


# DistributedDataParallel imports torch._dynamo when it is first made: two seconds of every rank.
PRELOADED = ["torch", "torch.distributed", "torch.nn.parallel", "torch.testing", "torch._dynamo", "numpy", "pytest"]


def _serve(pipe, index: int, environment: dict[str, str]) -> None:
    os.environ.update(environment)  # as it is now: the server has what there was when it was started
    # A rank is one core's worth of work; more threads would only make ranks wait for each other.
    os.environ.update(OMP_NUM_THREADS="1", FUSEDCOMM_QUIET="1", NCCL_HOSTID=f"rank {index}", **ONE_GPU)
    import torch

    torch.set_num_threads(1)
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
        # A function may leave the group at once, which a rank that is still connecting would take for a crash.
        dist.barrier()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return function(rank, world_size, *args)
    finally:
        dist.destroy_process_group()


class Ranks:
    """`num_ranks` processes. ``run(function, *args)`` calls ``function(rank, world_size, *args)`` on the first
    `world_size` of them and returns their results in rank order; functions must be importable."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._pipes, self.processes = [], []
        for index in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, index, dict(os.environ)), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args, world_size: int | None = None, backend: str = "gloo") -> list:
        results = self.outcomes(function, *args, world_size=world_size, backend=backend)
        errors = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(results) if kind != "value"]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in results]

    def outcomes(
        self, function, *args, world_size: int | None = None, lost: int | None = None, backend: str = "gloo"
    ) -> list:
        """As `run`, but errors are results too: ("value", result) or ("error", traceback). Nothing is asked of the rank
        `lost`, which the function kills or stops; it is ("lost", None), and the ranks start anew."""
        world_size = world_size or self.num_ranks
        results, is_complete = [], False
        try:
            with tempfile.TemporaryDirectory() as folder:
                store_path = os.path.join(folder, "store")
                for rank in range(world_size):
                    self._pipes[rank].send((function, rank, world_size, store_path, backend, args))
                for rank in range(world_size):
                    results.append(("lost", None) if rank == lost else self._receive(rank))
            is_complete = lost is None and all(kind != "silent" for kind, _ in results)
        finally:  # also where a test's own timeout ends the waiting
            if not is_complete:
                # What such ranks do next would be taken for the answer to the next call.
                self._kill()
                self._start()
        return results

    def _receive(self, rank: int) -> tuple[str, object]:
        if not self._pipes[rank].poll(CALL_TIMEOUT_S):
            return ("silent", f"no answer within {CALL_TIMEOUT_S} s")
        try:
            return self._pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return ("silent", "its process ended")

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
