"""One rank of bench/timeline.py: trains with DDP, then with fusedcomm, and writes a trace of each from rank 0."""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.common import keep_memory
from lib.models import make_model
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fusedcomm
from fusedcomm.ranks import groups

WARMUP_STEPS = 4


class Training:
    def __init__(self, arguments: argparse.Namespace) -> None:
        model = make_model(arguments.model, int(arguments.params), arguments.size)
        self.batch = model.batch(arguments.batch, torch.Generator().manual_seed(dist.get_rank()))
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_cap_mb, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 1e-4, momentum=0.9, fused=True)

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.cross_entropy(self.ddp(self.batch[0]), self.batch[1]).backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def median_s(self, count: int) -> float:
        """Seconds of a step of which no trace is taken."""
        seconds = []
        for _ in range(count):
            dist.barrier()
            begin = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def record(arguments: argparse.Namespace, name: str, path: Path, traced: Callable[[Training], None]) -> None:
    """Trains, lets `traced` take a trace, and has rank 0 add the name and the time of a step without a trace."""
    training = Training(arguments)
    training.steps(WARMUP_STEPS)
    traced(training)
    step_s = training.median_s(arguments.steps)
    if dist.get_rank() == 0:
        document = json.loads(path.read_text())
        document |= {"name": name, "untraced_ms": step_s * 1e3}
        path.write_text(json.dumps(document))


def main() -> None:
    keep_memory()
    torch.set_num_threads(1)
    arguments = argparse.Namespace(**json.loads(sys.argv[1]))
    dist.init_process_group("gloo")
    of_ddp, of_fusedcomm = Path(arguments.of_ddp), Path(arguments.of_fusedcomm)

    def with_profiler(training: Training) -> None:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            training.steps(arguments.steps)
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(of_ddp))

    def attached(training: Training) -> None:
        comm = fusedcomm.attach(training.ddp, arguments.wire, quiet=True)
        training.steps(WARMUP_STEPS)
        with comm.trace(of_fusedcomm):
            training.steps(arguments.steps)

    record(arguments, "DDP", of_ddp, with_profiler)
    record(arguments, f"fusedcomm, {arguments.wire}", of_fusedcomm, attached)
    groups.end_together()


if __name__ == "__main__":
    main()
