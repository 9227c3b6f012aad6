"""What does a communication hook cost the host, for each bucket?

Every hook is registered on a DDP module of its own and called through the reducer as the backward pass calls it
(`Reducer._run_comm_hook`), with buckets of the same size, in turn. Two figures for each:

    call/…      until the hook returns: what the backward pass is held up
    result/…    until the bucket's future is complete: what a bucket costs from end to end

Run with one rank (the network costs nothing, the host's share is all there is) or, with --ranks 2, over loopback. The
host's share is seen best with small buckets. Results are checked before anything is timed.
"""

import argparse
import datetime
import multiprocessing as mp
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from _common import Row, env, print_table, write_json
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm

NUM_BUCKETS = 16


def noop_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class Parameters(torch.nn.Module):
    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(numel) for _ in range(NUM_BUCKETS))

    def forward(self) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights)


class Impl:
    """One hook on one module of NUM_BUCKETS buckets of `numel` elements."""

    def __init__(
        self, name: str, register: Callable[[DistributedDataParallel], object], numel: int, scale: float
    ) -> None:
        self.name = name
        # A cap of one byte puts each parameter into a bucket of its own, once DDP has rebuilt its buckets.
        self.ddp = DistributedDataParallel(Parameters(numel), bucket_cap_mb=1 / (1 << 20))
        self.has_hook = register(self.ddp) is not False
        for _ in range(3):
            self.ddp().backward()
        self.buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        self.scale = scale  # a no-op leaves the sum undone, DDP's default divides before its hook
        self.call_s: list[float] = []
        self.result_s: list[float] = []

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future:
        if self.has_hook:
            return self.ddp.reducer._run_comm_hook(bucket)
        return self.ddp.reducer._run_allreduce_hook(bucket)

    def check(self, rank: int, world_size: int) -> bool:
        """Rank r sends r + 1 in every element; the mean is exact in every wire, equal values being so even in int8."""
        results = []
        for bucket in self.buckets:
            bucket.buffer().fill_(rank + 1)
        for future in [self.run(bucket) for bucket in self.buckets]:
            value = future.wait()
            results.append((value[0] if isinstance(value, list) else value).unique().tolist())
        mean = (world_size + 1) / 2
        expected = rank + 1 if self.name == "no-op" else mean * self.scale
        return len(self.buckets) == NUM_BUCKETS and results == [[expected]] * NUM_BUCKETS

    def time_once(self) -> None:
        """As in a backward pass: all buckets are handed over, then all results are waited for."""
        futures = []
        started = time.perf_counter()
        for bucket in self.buckets:
            futures.append(self.run(bucket))
        called = time.perf_counter()
        for future in futures:
            future.wait()
        done = time.perf_counter()
        self.call_s.append((called - started) / NUM_BUCKETS)
        self.result_s.append((done - started) / NUM_BUCKETS)


def make_impls(numel: int, world_size: int) -> list[Impl]:
    group = dist.group.WORLD

    def builtin(ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def python(hook: Callable) -> Callable[[DistributedDataParallel], None]:
        return lambda ddp: ddp.register_comm_hook(group, hook)

    def ours(wire: str, sum: str = "auto") -> Callable[[DistributedDataParallel], object]:
        return lambda ddp: fusedcomm.attach(ddp, wire=wire, sum=sum, exempt=(), quiet=True)

    def state(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(fusedcomm.CommState(wire="fp16"), fusedcomm.comm_hook)

    return [
        Impl("no-op", python(noop_hook), numel, 1),
        Impl("ddp default", lambda ddp: False, numel, world_size),
        Impl("python allreduce_hook", python(default_hooks.allreduce_hook), numel, 1),
        Impl("python fp16_compress_hook", python(default_hooks.fp16_compress_hook), numel, 1),
        Impl("c++ fp16_compress_hook", builtin, numel, 1),
        Impl("fusedcomm fp32", ours("fp32"), numel, 1),
        Impl("fusedcomm fp16", ours("fp16"), numel, 1),
        Impl("fusedcomm bf16", ours("bf16"), numel, 1),
        Impl("fusedcomm fp16 two-shot", ours("fp16", "two-shot"), numel, 1),
        Impl("fusedcomm int8 two-shot", ours("int8", "two-shot"), numel, 1),
        Impl("fusedcomm.comm_hook fp16", state, numel, 1),
    ]


def measure(rank: int, world_size: int, store: str, numels: list[int], rounds: int) -> list[Row]:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size, timeout=timeout
    )
    rows = []
    for numel in numels:
        impls = make_impls(numel, world_size)
        for impl in impls:
            if not impl.check(rank, world_size):
                raise RuntimeError(f"{impl.name}: wrong result with buckets of {numel} elements")
        for index in range(rounds):
            # Another order in each round, the same on every rank.
            for impl in impls[index % len(impls) :] + impls[: index % len(impls)]:
                dist.barrier()
                impl.time_once()
        warm = rounds // 10
        for case, times in (("call", "call_s"), ("result", "result_s")):
            for impl in impls:
                seconds = getattr(impl, times)[warm:]
                rows.append(
                    Row(
                        case=f"{case}/{numel}",
                        impl=impl.name,
                        numel=numel,
                        traffic_bytes=4 * numel,
                        median_s=statistics.median(seconds),
                        best_s=min(seconds),
                        checked=True,
                    )
                )
    dist.destroy_process_group()
    return rows


def _rank(rank: int, world_size: int, store: str, numels: list[int], rounds: int, pipe) -> None:
    rows = measure(rank, world_size, store, numels, rounds)
    if rank == 0:
        pipe.send(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="local ranks (1)")
    parser.add_argument("--numel", type=int, nargs="+", default=[1024, 65536], help="elements in a bucket (1024 65536)")
    parser.add_argument("--rounds", type=int, default=200, help="timed rounds of 16 buckets each (200)")
    parser.add_argument("--quick", action="store_true", help="20 rounds")
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    rounds = 20 if arguments.quick else arguments.rounds
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        processes = [
            context.Process(target=_rank, args=(rank, arguments.ranks, store, arguments.numel, rounds, theirs))
            for rank in range(arguments.ranks)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            rows = ours.recv()
        except EOFError:
            raise SystemExit("a rank failed; its error is above") from None
        for process in processes:
            process.join()
    print_table(rows)
    if arguments.json:
        write_json(arguments.json, rows, env={**env(), "threads": 1, "ranks": arguments.ranks})


if __name__ == "__main__":
    main()
