"""One rank of bench/optimizer.py --part speed: steps the same model in every way by turns, and writes rows as JSON."""

import functools
import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from _optimizer_ways import (
    DDP,
    REPLICATED,
    SHARDED,
    ZERO,
    Float32Muon,
    Hyperparameters,
    Trained,
    Way,
    flat,
    refuse_different,
    refuse_other_bits,
    two_shot,
)
from lib.common import drop_memory, in_turn, keep_memory
from lib.rank import started
from torch import Tensor, nn

from fusedcomm import Config
from fusedcomm.tools.probe.workload import Layer

CHECKED_STEPS = 3
TOLERANCES = {"fp32": 1e-2, "int8": 0.3}
"""Greatest norm of the difference from the replicated fp32 optimizer's change, as a part of that. With int8 the sign of
a gradient near zero may be another, and AdamW moves by signs at first."""
LOOPBACK = "lo"
ONLY_CHECKED = (
    Way("replicated fp32", REPLICATED, two_shot("fp32")),
    Way("sharded fp32/fp32", SHARDED, two_shot("fp32"), "fp32"),
)
"""The first is what all others are compared with; these have its bits."""


def ways(ranks_per_host: int) -> list[Way]:
    """The first is the one that the table compares with. On one level: as without `hosts`."""
    int8 = Config("int8")
    one_level = [Way("replicated int8, one level", REPLICATED, two_shot("int8"))] if ranks_per_host > 1 else []
    return [
        Way("replicated int8", REPLICATED, int8),
        *one_level,
        Way("sharded int8/int8", SHARDED, int8, "int8"),
        Way("sharded int8/bf16", SHARDED, int8, "bf16"),
        Way("DDP", DDP),
        Way("DDP, ZeroRedundancyOptimizer", ZERO),
        Way("hook int8, ZeroRedundancyOptimizer", ZERO, int8),
    ]


class Layers(nn.Module):
    """Matrices and biases of a transformer's layers, and an embedding. Their gradients on this rank are fixed, and
    both passes wait `device_s` seconds in all."""

    def __init__(self, width: int, depth: int, device_s: float) -> None:
        super().__init__()
        matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        layers = [shape for matrix in matrices for shape in (matrix, matrix[:1])] * depth
        generator = torch.Generator().manual_seed(0)
        self.codes = nn.Parameter(torch.randn(256, width, generator=generator) * 0.02)
        self.layers = nn.ParameterList(torch.randn(shape, generator=generator) * 0.02 for shape in layers)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._gradients = [torch.randn(p.shape, generator=generator) for p in self.parameters()]
        self._matrix_s = device_s / (len(layers) // 2)

    def forward(self) -> Tensor:
        value = torch.zeros((), requires_grad=True)
        for p, gradient in zip(self.parameters(), self._gradients, strict=True):
            # A backward pass takes twice as long as a forward pass.
            seconds = self._matrix_s / 3 if p.dim() == 2 and p is not self.codes else 0.0
            time.sleep(seconds)
            value = Layer.apply(value, p, gradient, functools.partial(time.sleep, 2 * seconds))
        return value


def make(way: Way, kind: str, settings: dict, device_ms: float) -> Trained:
    model = Layers(settings["width"], settings["depth"], device_ms * 1e-3)
    wanted = Hyperparameters(kind, settings["lr"], settings["muon_lr"], Float32Muon)
    return Trained(way, model, wanted, dist.new_group())


def step(trained: Trained) -> tuple[float, float]:
    """Seconds that this rank took, and that its threads were on cores."""
    dist.barrier()
    begin, on_cores = time.perf_counter(), time.process_time()
    trained.module().backward()
    trained.step()
    trained.zero_grad()
    return time.perf_counter() - begin, time.process_time() - on_cores


def sent_by_hosts() -> Tensor:
    """Bytes that this host's interfaces have sent, by the kernel's count: int64 [2], all, and those of other interfaces
    than the loopback. 0 on all ranks of a host but one."""
    total, away = 0, 0
    if int(os.environ["LOCAL_RANK"]) == 0:
        for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
            name, numbers = line.split(":")
            nbytes = int(numbers.split()[8])
            total, away = total + nbytes, away + nbytes * (name.strip() != LOOPBACK)
    return torch.tensor([total, away])


def counted_step(trained: Trained) -> list[int]:
    """Makes a step. Returns bytes that a rank sends in it, mean of the ranks: in all, and to other hosts."""
    dist.barrier()
    sent = -sent_by_hosts()
    dist.barrier()
    step(trained)
    dist.barrier()
    sent += sent_by_hosts()
    dist.all_reduce(sent)
    return [int(each) // dist.get_world_size() for each in sent]


def check(trained: Trained, before: Tensor, expected: Tensor, is_exact: bool) -> list[int]:
    """Takes CHECKED_STEPS steps, and returns what counted_step() has of the last one. Raises RuntimeError if the
    parameters are not what they should be."""
    name = trained.way.name
    for _ in range(CHECKED_STEPS - 1):
        step(trained)
    sent = counted_step(trained)
    refuse_different(trained.model, name)
    if is_exact:
        refuse_other_bits(flat(trained.model), expected, name)
        return sent
    error = float((flat(trained.model) - expected).norm() / (expected - before).norm())
    if not error <= TOLERANCES["fp32" if trained.way.config is None else "int8"]:
        raise RuntimeError(f"{name}: its change differs by {error:.3g} of itself from the replicated fp32 optimizer's")
    if dist.get_rank() == 0:
        print(f"{name:34} error {error:.2e}", flush=True)
    return sent


def expected_after(kind: str, settings: dict) -> tuple[Tensor, Tensor]:
    """The parameters before and after CHECKED_STEPS steps of the replicated fp32 optimizer, fp32 [numel]. Raises
    RuntimeError if fp32 updates have other bits."""
    before, expected = torch.empty(0), None
    for way in ONLY_CHECKED:
        trained = make(way, kind, settings, 0.0)
        before = flat(trained.model)
        if expected is None:
            for _ in range(CHECKED_STEPS):
                step(trained)
            expected = flat(trained.model)
        else:
            check(trained, before, expected, is_exact=True)
        trained.close()
        del trained
        drop_memory()
    return before, expected


def measure(kind: str, settings: dict, rows: list[dict]) -> None:
    """Adds a row for each way to `rows`."""
    before, expected = expected_after(kind, settings)
    found = []
    for way in ways(settings["ranks_per_host"]):
        trained = make(way, kind, settings, settings["device_ms"])
        found.append((trained, check(trained, before, expected, is_exact=False)))
    seconds = torch.empty(2, len(found), settings["rounds"], dtype=torch.float64)
    gc.disable()
    for turn in range(settings["rounds"]):
        for place in in_turn(range(len(found)), turn):
            seconds[:, place, turn] = torch.tensor(step(found[place][0]))
    gc.enable()
    dist.all_reduce(seconds[0], op=dist.ReduceOp.MAX)
    dist.all_reduce(seconds[1])
    has_hosts = bool(settings["hosts"])
    for (trained, (tx, away)), of_way, on_cores in zip(found, *seconds.tolist(), strict=True):
        refuse_different(trained.model, trained.way.name)
        rows.append(
            {
                "optimizer": kind,
                "way": trained.way.name,
                "numel": len(expected),
                "step_s": [round(each, 5) for each in of_way],
                "cores_s": [round(each, 5) for each in on_cores],
                "tx_nbytes": tx if has_hosts else None,
                "away_nbytes": away if has_hosts else None,
                "sent_nbytes": trained.sent_nbytes(CHECKED_STEPS + settings["rounds"]),
                "state_nbytes": trained.state_nbytes,
                "memory": memory(trained),
                "load": round(os.getloadavg()[0], 1),
            }
        )
        trained.close()


def memory(trained: Trained) -> dict[str, int] | None:
    """What a ShardedOptimizer keeps beside the optimizers' state, in bytes."""
    if trained.sharded is None:
        return None
    plan = trained.sharded.plan()
    names = ("master_nbytes", "buffer_nbytes")
    return {name: getattr(plan, name) for name in names}


def main() -> None:
    keep_memory()
    with started() as (settings, hand_over):
        rows: list[dict] = []
        for kind in settings["optimizers"]:
            measure(kind, settings, rows)
            hand_over(rows)
            drop_memory()


if __name__ == "__main__":
    main()
