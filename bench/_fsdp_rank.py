"""One rank of bench/fsdp.py, which starts the ranks and reads the rows that rank 0 writes."""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from _ddp_step_rank import WireCounter
from lib.common import Row, in_turn, keep_memory, percentiles
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fusedcomm
from fusedcomm.ranks import groups

PLAIN, GATHER = "fully_shard", "no gradients"
BATCH = 4


@dataclasses.dataclass(frozen=True)
class Way:
    """`wire`: None: torch's own reduce-scatter. `params`: the wire of all-gathers. `kept`: what a host keeps between
    the passes, "shards", by reshard_after_forward=, or "codes". `tolerance`: of the error of gradients."""

    wire: str | None = None
    params: str = "fp32"
    kept: str = ""
    reduce_dtype: torch.dtype | None = None
    tolerance: float = 1e-6
    reduces: bool = True


WAYS = {
    GATHER: Way(reduces=False),
    PLAIN: Way(),
    "fully_shard, reduce_dtype bf16": Way(reduce_dtype=torch.bfloat16, tolerance=0.02),
    "fusedcomm fp32": Way("fp32"),
    "fusedcomm bf16": Way("bf16", tolerance=0.005),
    "fusedcomm int8": Way("int8", tolerance=0.02),
    "fusedcomm int4": Way("int4", tolerance=0.2),
    "fusedcomm int8, params bf16": Way("int8", "bf16", tolerance=0.03),
    "fusedcomm int8, params int8": Way("int8", "int8", tolerance=0.05),
    "fusedcomm int8, params int8, kept": Way("int8", "int8", kept="shards", tolerance=0.05),
    "fusedcomm int8, params int8, codes kept": Way("int8", "int8", kept="codes", tolerance=0.05),
    "fusedcomm int4, params int4": Way("int4", "int4", tolerance=0.4),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Runner:
    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.way = name, WAYS[name]
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block(arguments.width) for _ in range(arguments.layers)])
        dtype = torch.bfloat16 if arguments.param_dtype == "bf16" else None
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=self.way.reduce_dtype)
        reshard = arguments.ranks_per_host if self.way.kept == "shards" else None
        for block in self.model:
            fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
        fully_shard(self.model, mp_policy=policy)
        self.model.set_requires_gradient_sync(self.way.reduces)
        self.handle = None
        if self.way.wire is not None:
            config = fusedcomm.Config(self.way.wire, params=self.way.params, params_kept=self.way.kept == "codes")
            self.handle = fusedcomm.attach(self.model, config, quiet=True)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.batch = torch.randn(BATCH, arguments.width, generator=generator)
        self.step_s: list[float] = []
        self.line_nbytes: list[float] = []

    def step(self) -> None:
        self.model.zero_grad()
        if not self.way.reduces:
            # What has not been reduced stays in the unsharded parameters.
            for module in self.model.modules():
                if isinstance(module, torch.distributed.fsdp.FSDPModule):
                    for group in module._get_fsdp_state()._fsdp_param_groups:
                        for parameter in group.fsdp_params:
                            parameter.unsharded_accumulated_grad = None
        self.model(self.batch).square().mean().backward()

    def gradients(self) -> list[torch.Tensor]:
        self.step()
        return [p.grad.to_local().clone() for p in self.model.parameters()]

    def sent_nbytes(self, world_size: int) -> float:
        if not self.way.reduces:
            return 0.0
        if self.handle is not None:
            return sum(row.sent_nbytes for row in self.handle.plan().rows)
        element = 4 if self.way.reduce_dtype is None else 2
        return element * (world_size - 1) * sum(p.to_local().numel() for p in self.model.parameters())

    @property
    def planned_nbytes(self) -> int | None:
        """What the plan says that rank 0's host sends to others in a step."""
        return None if self.handle is None else self.handle.plan().traffic.nbytes


def error_of(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Over all ranks."""
    sums = torch.tensor(
        [
            sum((g - w).double().square().sum().item() for g, w in zip(got, want, strict=True)),
            sum(w.double().square().sum().item() for w in want),
        ]
    )
    dist.all_reduce(sums)
    return (sums[0] / sums[1]).sqrt().item()


def measure(runners: list[Runner], arguments: argparse.Namespace, say: Callable[[str], None]) -> dict[str, float]:
    """Times all ways in turn. Returns the errors of their gradients."""
    exact = next(runner for runner in runners if runner.name == PLAIN).gradients()
    errors = {runner.name: error_of(runner.gradients(), exact) if runner.way.reduces else 0.0 for runner in runners}
    counter = WireCounter()
    for index in range(arguments.rounds):
        for runner in in_turn(runners, index):
            dist.barrier()
            for step in range(arguments.steps + 1):
                began, sent = time.perf_counter(), counter.read()
                runner.step()
                if step > 0:  # the first brings the caches to this way
                    runner.step_s.append(time.perf_counter() - began)
                    runner.line_nbytes.append(counter.read() - sent)
        say(f"{arguments.case}: round {index + 1} of {arguments.rounds}")
    return errors


def rows_of(runners: list[Runner], errors: dict[str, float], arguments: argparse.Namespace) -> list[Row]:
    medians = {runner.name: statistics.median(runner.step_s) for runner in runners}
    line = {runner.name: statistics.median(runner.line_nbytes) for runner in runners}
    numel = sum(p.numel() for p in runners[0].model.parameters())
    return [
        Row(
            *(arguments.case, runner.name, numel, 4 * numel, medians[runner.name], min(runner.step_s)),
            checked=errors[runner.name] <= runner.way.tolerance + (0.02 if arguments.param_dtype == "bf16" else 0),
            percentiles_s=percentiles(runner.step_s),
            figures={
                "gradients_s": medians[runner.name] - medians[GATHER],
                "sent_nbytes": runner.sent_nbytes(dist.get_world_size()),
                "planned_nbytes": runner.planned_nbytes,
                "line_nbytes": line[runner.name],
                "error": errors[runner.name],
            },
        )
        for runner in runners
    ]


def main() -> None:
    torch.set_num_threads(1)
    keep_memory()
    results, text = sys.argv[1:]
    arguments = argparse.Namespace(**json.loads(text))
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    runners = [Runner(name, arguments) for name in arguments.ways]
    errors = measure(runners, arguments, lambda line: print(line, flush=True) if rank == 0 else None)
    if rank == 0:
        rows = rows_of(runners, errors, arguments)
        Path(results).write_text(json.dumps([dataclasses.asdict(row) for row in rows]))
    for runner in runners:
        if runner.handle is not None:
            runner.handle.detach()
    groups.end_together()


if __name__ == "__main__":
    main()
