"""One rank of bench/hook_overhead.py, which starts the ranks and reads what rank 0 writes."""

import argparse
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from lib.common import Report, Row, in_turn
from lib.gpu_timeline import events_of
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.ranks import groups

NUM_BUCKETS = 16
"""Buckets of each module."""


def noop_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    future = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
    future.set_result(buffer)
    return future


class Parameters(torch.nn.Module):
    def __init__(self, numel: int, device: str, num_buckets: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(numel, device=device) for _ in range(num_buckets))

    def forward(self) -> torch.Tensor:
        return sum(weight.sum() for weight in self.weights)


class Impl:
    """One hook on one module with `num_buckets` of `numel` elements. `scale`: the hook's result / the mean."""

    def __init__(
        self,
        name: str,
        register: Callable[[DistributedDataParallel], object],
        numel: int,
        scale: float,
        device: str,
        num_buckets: int = NUM_BUCKETS,
    ) -> None:
        self.name, self.device, self.num_buckets = name, device, num_buckets
        # A cap of one byte gives each parameter its own bucket, once DDP has rebuilt its buckets.
        self.ddp = DistributedDataParallel(Parameters(numel, device, num_buckets), bucket_cap_mb=1 / (1 << 20))
        self.has_hook = register(self.ddp) is not False
        for _ in range(3):
            self.ddp().backward()
        self.buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        self.scale = scale  # DDP's default divides before its all-reduce, so this all-reduce alone returns the sum
        self.call_s: list[float] = []
        self.result_s: list[float] = []

    def run(self, bucket: dist.GradBucket) -> torch.futures.Future:
        if self.has_hook:
            return self.ddp.reducer._run_comm_hook(bucket)
        return self.ddp.reducer._run_allreduce_hook(bucket)

    def check(self, rank: int, world_size: int) -> bool:
        """Whether results are right. Rank r sends r + 1 in every element. All values are equal, so the mean is exact in
        every wire, even int8."""
        results = []
        for bucket in self.buckets:
            bucket.buffer().fill_(rank + 1)
        for future in [self.run(bucket) for bucket in self.buckets]:
            value = future.wait()
            results.append((value[0] if isinstance(value, list) else value).unique().tolist())
        mean = (world_size + 1) / 2
        expected = rank + 1 if self.name == "no-op" else mean * self.scale
        return len(self.buckets) == self.num_buckets and results == [[expected]] * self.num_buckets

    def time_once(self) -> None:
        """Hands over all buckets, then waits for all results, as a backward pass does."""
        futures = []
        synchronize(self.device)
        started = time.perf_counter()
        for bucket in self.buckets:
            futures.append(self.run(bucket))
        called = time.perf_counter()
        for future in futures:
            future.wait()
        synchronize(self.device)
        done = time.perf_counter()
        self.call_s.append((called - started) / self.num_buckets)
        self.result_s.append((done - started) / self.num_buckets)

    def launches(self) -> dict[str, float] | None:
        """Kernels ("kernels", of which "nccl" are NCCL's) and copies (memcpy, memset) for each bucket. None if the
        profiler sees no kernel."""

        def once() -> None:
            if self.device == "cuda":
                torch.cuda._sleep(1000)  # one kernel that must be seen: some hooks launch none
            self.time_once()

        events = events_of(once)
        kernels = [event["name"] for event in events if event.get("cat") == "kernel"]
        copies = [event["name"] for event in events if event.get("cat") in ("gpu_memcpy", "gpu_memset")]
        if not kernels:
            return None
        counts = {"kernels": len(kernels) - 1, "nccl": sum("nccl" in name for name in kernels), "copies": len(copies)}
        return {name: count / self.num_buckets for name, count in counts.items()}


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def make_impls(numel: int, world_size: int, device: str) -> dict[str, Callable[[], Impl]]:
    group = dist.group.WORLD

    def builtin(ddp: DistributedDataParallel) -> None:
        ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

    def python(hook: Callable) -> Callable[[DistributedDataParallel], None]:
        return lambda ddp: ddp.register_comm_hook(group, hook)

    def ours(wire: str, sum: str = "auto") -> Callable[[DistributedDataParallel], object]:
        return lambda ddp: fusedcomm.attach(ddp, Config(wire, sum=sum, wires={"1d": wire}), quiet=True)

    def weighted(wire: str) -> Callable[[DistributedDataParallel], object]:
        def attach(ddp: DistributedDataParallel) -> None:
            fusedcomm.attach(ddp, Config(wire, wires={"1d": wire}, weighted="mean"), quiet=True).weight = 1

        return attach

    def state(ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(fusedcomm.CommState("fp16"), fusedcomm.comm_hook)

    hooks = {
        "no-op": python(noop_hook),
        "ddp default": lambda ddp: False,
        "python allreduce_hook": python(default_hooks.allreduce_hook),
        "python fp16_compress_hook": python(default_hooks.fp16_compress_hook),
        "python bf16_compress_hook": python(default_hooks.bf16_compress_hook),
        "c++ fp16_compress_hook": builtin,
        "fusedcomm fp32": ours("fp32"),
        "fusedcomm fp16": ours("fp16"),
        "fusedcomm bf16": ours("bf16"),
        "fusedcomm bf16 direct": ours("bf16", "direct"),
        "fusedcomm fp16 two-shot": ours("fp16", "two-shot"),
        "fusedcomm bf16 two-shot": ours("bf16", "two-shot"),
        "fusedcomm int8 two-shot": ours("int8", "two-shot"),
        "fusedcomm int8": ours("int8"),
        "fusedcomm fp32 weighted": weighted("fp32"),
        "fusedcomm bf16 weighted": weighted("bf16"),
        "fusedcomm.comm_hook fp16": state,
    }
    only = {
        "cpu": {"fusedcomm fp16", "fusedcomm fp16 two-shot", "fusedcomm.comm_hook fp16"},
        "cuda": {"python bf16_compress_hook", "fusedcomm bf16 two-shot"},
    }
    elsewhere = only["cuda" if device == "cpu" else "cpu"]
    scales = {"ddp default": world_size}
    return {
        name: lambda name=name, hook=hook: Impl(name, hook, numel, scales.get(name, 1), device)
        for name, hook in hooks.items()
        if name not in elsewhere
    }


# ---- one rank


def make_and_check(numel: int, device: str, report: Report) -> dict[str, Impl]:
    """The hooks whose results are right, by name. On a CPU a failure is raised. On a GPU it is reported, and the other
    hooks are measured."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    impls = {}
    for name, make in make_impls(numel, world_size, device).items():
        try:
            impl = make()
            if not impl.check(rank, world_size):
                raise RuntimeError(f"{name}: wrong result with buckets of {numel} elements")
        except Exception as error:
            if device == "cpu":
                raise
            if rank == 0:
                report.missing(f"hook/{numel}", name, f"{type(error).__name__}: {error}")
            synchronize(device)  # raises if the device is lost
            continue
        impls[name] = impl
    report.extra.setdefault("checked", {})[str(numel)] = list(impls)
    report.write()
    return impls


def time_in_turn(impls: list[Impl], rounds: int) -> None:
    for index in range(rounds):
        for impl in in_turn(impls, index):
            if dist.get_world_size() > 1:
                dist.barrier()
            impl.time_once()


def rows_of(numel: int, impls: list[Impl], rounds: int) -> list[Row]:
    rows = []
    for case, times in (("call", "call_s"), ("result", "result_s")):
        for impl in impls:
            seconds = getattr(impl, times)[rounds // 10 :]
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
    return rows


def count_launches(numel: int, impls: list[Impl], device: str, report: Report) -> None:
    for impl in impls:
        try:
            counts, reason = impl.launches(), "the profiler saw nothing on the device"
        except Exception as error:
            counts, reason = None, f"{type(error).__name__}: {error}"
        if counts is None:
            # The profiler may not work on this machine at all, so the other hooks are not tried.
            if dist.get_rank() == 0:
                report.missing(f"launches/{numel}", f"{impl.name} and the rest", reason, failed=False)
            synchronize(device)
            return
        report.extra.setdefault("launches", []).append({"numel": numel, "impl": impl.name, **counts})
        report.write()


def main() -> None:
    torch.set_num_threads(1)
    results, text = sys.argv[1:]
    arguments = argparse.Namespace(**json.loads(text))
    device, rank = arguments.device, int(os.environ["RANK"])
    if arguments.shared_gpu:
        # With different host IDs, NCCL takes the ranks to be on different hosts, and lets them share a GPU.
        os.environ.update(NCCL_HOSTID=f"fusedcomm-{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=120),
        device_id=torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else None,
    )
    path = arguments.json or results  # what is known stays there, also if this run is killed
    report = Report(path if rank == 0 else None, dry_run=arguments.dry_run, device=device)
    report.env.update(threads=1, ranks=arguments.ranks)
    everything = {}
    for numel in arguments.numel:
        everything[numel] = make_and_check(numel, device, report)
        impls = list(everything[numel].values())
        if impls and not arguments.check_only:
            time_in_turn(impls, arguments.rounds)
            report.add(rows_of(numel, impls, arguments.rounds))
    # This comes last, because a profiler may leave something running that would change times.
    if not arguments.check_only and (device == "cuda" or arguments.dry_run):
        for numel, impls in everything.items():
            count_launches(numel, list(impls.values()), device, report)
    groups.end_together()


if __name__ == "__main__":
    main()
