"""The ways in which a model is trained like in DistributedDataParallel: small models, and a table of them."""

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from models import SMALL_BUCKETS, Branches, Complex, Conv, Mixed, Mlp, Normalised, Sparse, Synchronized
from torch import nn
from torch.utils.checkpoint import checkpoint


class Checkpointed(nn.Module):
    """With a reentrant `second` all gradients but those of `first` come in backward passes of their own."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(10, 32), nn.Linear(32, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.head(x)


class Tied(nn.Module):
    """One parameter under two names, and one module that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.twice, self.write = (nn.Linear(10, 10) for _ in range(3))
        self.write.weight = self.read.weight
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(torch.tanh(self.twice(self.read(x))))
        return self.head(self.write(torch.tanh(x)))


class Odd(nn.Module):
    """Parameters without dimensions and without elements, and one whose gradient autograd leaves expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.shift = nn.Parameter(torch.randn(8, 5))
        self.layer = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale + self.shift.sum() + self.none.sum()


class Ignoring(nn.Module):
    """A parameter and a buffer that differ from rank to rank, and a parameter of the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(10, 5), nn.Linear(5, 5)
        self.own.register_buffer("mark", torch.zeros(1))
        self.shift = nn.Parameter(torch.zeros(5))
        self._ddp_params_and_buffers_to_ignore = ["own.weight", "own.mark", "own.bias"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(self.shared(x)) + self.shift + self.own.mark


class Replacing(nn.Module):
    """Replaces its buffer in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 5)
        self.register_buffer("offset", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.offset = self.offset + x.mean()
        return self.layer(x) + self.offset


class Now(nn.Module):
    """Every rank uses `now` in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.now = nn.Linear(10, 5), nn.Linear(5, 5)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        return self.now(self.always(x)) if self.step % 2 else self.always(x)


class Words(nn.Module):
    """Rank 1 does not use the embedding in the first step, and no rank does in the second."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(40, 16, sparse=sparse), nn.Linear(16, 5)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        if self.step == 2 or (self.step == 1 and dist.get_rank() == 1):
            return self.head(torch.ones(8, 16))
        return self.head(self.embedding(torch.arange(8) + 8 * dist.get_rank()))


def freeze(model: nn.Module, step: int) -> None:
    model.layers[0].weight.requires_grad_(step not in (0, 2))


def compile_layers(model: nn.Module, step: int) -> None:
    if step == 0:
        model.layers.compile(backend="aot_eager")


def keep_a_gradient(model: nn.Module, step: int) -> None:
    """Of a parameter that no rank uses: it stays what it is."""
    model.never.weight.grad = torch.full((16, 16), 0.0071)


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How a model is wrapped and fed.

    Attributes:
        ddp: options of DistributedDataParallel.
        reference: the model under DDP as it comes, if it must be another one.
        accumulate: backward passes per optimizer step; all except the last one only add up.
        uneven: ranks have different numbers of batches, under Join.
        zeroing: what is done with gradients between steps: "none", "zeros" or "nothing".
        differs: ranks begin with other parameters, which the front end makes equal.
        before_step: called with the model and the step.
        evaluates: the model is called without gradients after each step. FSDP2 then keeps whole parameters, and what is
            frozen before the next step are these alone.
        needs: what a front end may lack; see front_ends.py.
    """

    model: Callable[[], nn.Module] = Mlp
    ddp: dict = dataclasses.field(default_factory=dict)
    reference: Callable[[], nn.Module] | None = None
    accumulate: int = 1
    uneven: bool = False
    image: bool = False
    zeroing: str = "none"
    differs: bool = False
    before_step: Callable[[nn.Module, int], object] = lambda model, step: None
    evaluates: bool = True
    needs: tuple[str, ...] = ()

    def build(self, reference: bool = False, rank: int = 0) -> nn.Module:
        torch.manual_seed(5 + rank * self.differs)
        return self.reference() if reference and self.reference else self.model()

    def batch(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs (8, 10) or (8, 3, 8, 8) and targets (8, 5), different on each rank and in each step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        shape = (8, 3, 8, 8) if self.image else (8, 10)
        return torch.randn(shape, generator=generator), torch.randn(8, 5, generator=generator)


FINDS = {"find_unused_parameters": True}
UNUSED, OWN = ("unused on a rank",), ("buffers", "own names")
CASES = {
    "plain": Scenario(),
    "small buckets": Scenario(ddp=SMALL_BUCKETS),
    "static graph": Scenario(ddp={"static_graph": True, **SMALL_BUCKETS}, needs=("static_graph",)),
    "find unused": Scenario(
        model=Branches, ddp={"find_unused_parameters": True, **SMALL_BUCKETS}, needs=("unused on a rank",)
    ),
    "no sync": Scenario(accumulate=3),
    "join": Scenario(uneven=True, evaluates=False, needs=("join",)),
    "join, unused": Scenario(Branches, FINDS, uneven=True, evaluates=False, needs=(*UNUSED, "join")),
    "channels last": Scenario(model=Conv, image=True, needs=("memory order",)),
    "complex": Scenario(model=Complex),
    # gloo's sparse all-reduce, which DDP as it comes would use, sometimes corrupts the heap.
    "sparse": Scenario(model=Sparse, reference=lambda: Sparse(sparse=False), needs=("sparse",)),
    "bf16 parameters": Scenario(model=lambda: Mlp(torch.bfloat16)),
    "float64 parameters": Scenario(model=lambda: Mlp(torch.float64)),
    "mixed dtypes": Scenario(model=Mixed, ddp=SMALL_BUCKETS, needs=("several dtypes",)),
    "collectives in backward": Scenario(model=Synchronized, ddp=SMALL_BUCKETS),
    "zeroed in place": Scenario(zeroing="zeros", ddp=SMALL_BUCKETS),
    "never zeroed": Scenario(zeroing="nothing", ddp=SMALL_BUCKETS, needs=("adds to means",)),
    "accumulated in place": Scenario(zeroing="zeros", accumulate=2, ddp=SMALL_BUCKETS),
    "unused in place": Scenario(Branches, FINDS, zeroing="zeros", needs=UNUSED),
    "unused, accumulated": Scenario(Branches, FINDS, accumulate=3, needs=UNUSED),
    "unused, with a gradient": Scenario(Branches, FINDS, before_step=keep_a_gradient, needs=UNUSED),
    "unused on all ranks": Scenario(Now, FINDS),
    "unused and sparse": Scenario(Words, FINDS, lambda: Words(sparse=False), needs=("unused sparse",)),
    "frozen and thawed": Scenario(ddp={**FINDS, **SMALL_BUCKETS}, before_step=freeze, evaluates=False),
    "tied and shared": Scenario(Tied, {"bucket_cap_mb": 0.0005}),
    "no dimensions, no elements": Scenario(Odd, {"bucket_cap_mb": 0.0001}, needs=("no dimensions",)),
    "checkpointed": Scenario(lambda: Checkpointed(False), SMALL_BUCKETS),
    "checkpointed, reentrant": Scenario(lambda: Checkpointed(True), SMALL_BUCKETS, accumulate=2, needs=("reentrant",)),
    "compiled": Scenario(before_step=compile_layers),
    "different at first": Scenario(differs=True, needs=("buffers",)),
    "without init_sync": Scenario(ddp={"init_sync": False}, needs=("buffers",)),
    "buffers": Scenario(Normalised, differs=True, needs=("buffers",)),
    "buffers of each rank": Scenario(Normalised, {"broadcast_buffers": False}, needs=("buffers",)),
    "buffers, accumulated": Scenario(Normalised, accumulate=3, needs=("buffers",)),
    "buffers that are replaced": Scenario(Replacing, needs=("buffers",)),
    "ignored": Scenario(Ignoring, differs=True, needs=OWN),
}
