"""What bench/optimizer.py compares: who steps the parameters, and what the ranks send each other for it."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator

import torch
import torch.distributed as dist
from lib.rank import gathered
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import Config

REPLICATED, SHARDED, DDP, ZERO = "replicated", "sharded", "DDP", "ZeRO"
KINDS = ("adamw", "muon")
NOT_HIDDEN = ("codes", "places", "head")
"""Modules whose matrices Muon leaves to AdamW: embeddings and the last layer."""


class Float32Muon(torch.optim.Muon):
    """torch's Muon with Newton–Schulz in fp32. A processor without instructions for bf16 takes 15 times as long for
    torch's products in bf16, and a step would be nothing else."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(momentum, group["momentum"]), group)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def orthogonal(matrix: Tensor, group: dict) -> Tensor:
    """Newton–Schulz with the group's coefficients. matrix: fp32 [m, n]; so is the result."""
    a, b, c = group["ns_coefficients"]
    is_tall = matrix.shape[0] > matrix.shape[1]
    value = matrix.T if is_tall else matrix
    value = value / value.norm().clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = value @ value.T
        value = torch.addmm(value, torch.addmm(gram, gram, gram, beta=b, alpha=c), value, beta=a)
    return value.T if is_tall else value


@dataclasses.dataclass(frozen=True)
class Way:
    """front: REPLICATED, SHARDED, DDP or ZERO. config: of the gradients; None: DDP's own all-reduce. update: the wire
    of a ShardedOptimizer's updates."""

    name: str
    front: str
    config: Config | None = None
    update: str = ""


def two_shot(wire: str) -> Config:
    return Config(wire, sum="two-shot", hosts=None)


@dataclasses.dataclass(frozen=True)
class Hyperparameters:
    """kind: one of KINDS. lr: AdamW's; muon_lr: of the hidden layers' matrices with Muon. muon: its class."""

    kind: str
    lr: float
    muon_lr: float
    muon: type[torch.optim.Optimizer]

    def split(self, model: nn.Module) -> list[tuple[type[torch.optim.Optimizer], list[nn.Parameter], float]]:
        """(class, parameters, learning rate) of each group."""
        named = list(model.named_parameters())
        if self.kind == "adamw":
            return [(torch.optim.AdamW, [p for _, p in named], self.lr)]
        hidden = {name for name, p in named if p.dim() == 2 and name.split(".")[0] not in NOT_HIDDEN}
        of_muon, rest = [p for name, p in named if name in hidden], [p for name, p in named if name not in hidden]
        return [(self.muon, of_muon, self.muon_lr), (torch.optim.AdamW, rest, self.lr)]


class Trained:
    """A model with a way of synchronizing and stepping it.

    Attributes:
        module: what to call.
        optimizers: what to step, in this order.
        comm: fusedcomm's handle; None with DDP alone.
    """

    def __init__(
        self, way: Way, model: nn.Module, wanted: Hyperparameters, group: dist.ProcessGroup | None = None
    ) -> None:
        self.way, self.model, self.module = way, model, model
        self.comm: fusedcomm.GradReducer | fusedcomm.Handle | None = None
        if way.front in (DDP, ZERO):
            self.module = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
            if way.config is not None:
                self.comm = fusedcomm.attach(self.module, way.config, quiet=True)
        else:
            assert way.config is not None
            self.comm = fusedcomm.GradReducer(model, way.config, process_group=group, quiet=True)
        groups = wanted.split(model)
        self.sharded: fusedcomm.ShardedOptimizer | None = None
        if way.front == SHARDED:
            self.sharded = fusedcomm.ShardedOptimizer(
                self.comm,
                params=[{"params": params, "optimizer_class": kind, "lr": lr} for kind, params, lr in groups],
                update=way.update,
                quiet=True,
            )
            self.optimizers: list[torch.optim.Optimizer] = [self.sharded]
        elif way.front == ZERO:
            self.optimizers = [
                ZeroRedundancyOptimizer(
                    params, kind, process_group=group, parameters_as_bucket_view=True, overlap_with_ddp=False, lr=lr
                )
                for kind, params, lr in groups
            ]
        else:
            self.optimizers = [kind(params, lr=lr) for kind, params, lr in groups]

    def zero_grad(self) -> None:
        for each in self.optimizers:
            each.zero_grad()

    def step(self) -> None:
        for each in self.optimizers:
            each.step()

    def _local_optimizers(self) -> Iterator[torch.optim.Optimizer]:
        """Those that hold this rank's state."""
        for each in self.optimizers:
            if isinstance(each, ZeroRedundancyOptimizer):
                yield each.optim
            elif isinstance(each, fusedcomm.ShardedOptimizer):
                yield from each._owner.optimizers
            else:
                yield each

    @property
    def state_nbytes(self) -> int:
        """Of all tensors that this rank's optimizers keep."""
        states = (state for each in self._local_optimizers() for state in each.state.values())
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def sent_nbytes(self, steps: int) -> int | None:
        """By fusedcomm's count, what this rank sends in a step, of which it has made `steps`. None: it has no count,
        or counts a part."""
        if self.sharded is not None:
            return self.sharded.plan().sent_nbytes
        return self.comm.stats().sent_nbytes // steps if self.way.front == REPLICATED else None

    def close(self) -> None:
        self.zero_grad()
        if self.comm is not None:
            self.comm.detach()


def flat(model: nn.Module) -> Tensor:
    """All parameters, fp32 [numel], a copy."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def refuse_different(model: nn.Module, what: str) -> None:
    """Raises RuntimeError if the ranks' parameters differ in a bit."""
    if len(set(gathered(hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()))) > 1:
        raise RuntimeError(f"{what}: the ranks have different parameters")


def refuse_other_bits(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises RuntimeError if parameters that nothing has rounded have other bits than the replicated optimizer's."""
    if not torch.equal(found, expected):
        wrong = found != expected
        raise RuntimeError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} parameters differ from the replicated optimizer's, by at "
            f"most {float((found - expected).abs().max()):.3g}"
        )
