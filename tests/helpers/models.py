"""Models and gradients that several tests use: small models, one for each way in which DDP treats a bucket, and
gradients with known means."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
import torch.distributed as dist
from front_ends import FRONT_ENDS
from patience import patient
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config, LocalOptions


class Gradients(nn.Module):
    """A model with prescribed gradients: loss = Σ parameter · gradient."""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * gradient).sum() for weight, gradient in zip(self.weights, gradients, strict=True))


def synchronize(
    model: "DistributedDataParallel | Gradients", gradients: list[torch.Tensor], steps: int = 1
) -> list[torch.Tensor]:
    """Runs `steps` backward passes, each from zeroed gradients, of a Gradients, in DDP or by itself. Returns the
    gradients of the last pass."""
    for _ in range(steps):
        model.zero_grad(set_to_none=True)
        model(gradients).backward()
    return [weight.grad.clone() for weight in getattr(model, "module", model).weights]


def reducer_of(model: nn.Module | Iterable[tuple[str, torch.Tensor]], config: str | Config = "fp32", **kwargs):
    """A quiet GradReducer of the model. `kwargs`: further arguments."""
    return fusedcomm.GradReducer(model, config, quiet=True, **kwargs)


def synchronized(
    front_end: str,
    model: nn.Module,
    config: str | Config = "fp32",
    bucket_mib: float | None = None,
    find_unused: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple:
    """Returns what runs the forward pass, and what synchronizes its gradients, by a row of front_ends.py."""
    options = {"find_unused_parameters": find_unused, "process_group": group}
    if bucket_mib is not None:
        options["bucket_cap_mb"] = bucket_mib
    return FRONT_ENDS[front_end].make(model, config, **options)


def attach_to(
    model: nn.Module,
    wire: str = "int4",
    ddp_kwargs: dict | None = None,
    local: LocalOptions | None = None,
    wires: dict[str, str] | None = None,
    **kwargs,
) -> tuple:
    """Returns the DDP module and its handle. Every parameter is sent in `wire`, except those that `wires` matches.
    `kwargs`: further options of Config."""
    ddp = DistributedDataParallel(model, **(ddp_kwargs or {}))
    config = Config(wire, wires={**(wires or {}), "1d": wire}, **kwargs)
    return ddp, fusedcomm.attach(ddp, config, local=local, quiet=True)


def error_of(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable, *args, **kwargs) -> str:
    """The text of the error of these kinds that a call raises."""
    with pytest.raises(kinds) as error:
        call(*args, **kwargs)
    return str(error.value)


def refusal(call: Callable, *args, **kwargs) -> str:
    """The name and the text of the error with which a call is refused."""
    with pytest.raises(Exception) as error:
        call(*args, **kwargs)
    return f"{type(error.value).__name__}: {error.value}"


@contextlib.contextmanager
def stderr_to(path):
    """Redirects this process's stderr to a file, including what native code writes."""
    saved = os.dup(2)
    with open(path, "wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def on_host(name: str) -> Iterator[None]:
    """Makes this process believe that its host has that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "gethostname", lambda: name)
        yield


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, on every rank."""
    full = getattr(tensor, "full_tensor", lambda: tensor)()
    return full.detach().to_dense().clone()


def worst(errors: Iterable[float]) -> float:
    """The largest error; NaN if any is NaN. max() ignores a NaN that does not come first."""
    return torch.tensor(list(errors)).max().item()


def normal(rank: int, step: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Signed normal values that differ on every rank and in every step. Their scale grows with the rank."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, device="cpu") * (rank + 1)


def integers(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Signed integers in [-8, 8], different on every rank. A sum over few ranks is exact in every wire dtype
    except int8 and int4.
    """
    generator = torch.Generator("cpu").manual_seed(100 + rank)
    return torch.randint(-8, 9, shape, generator=generator, device="cpu").to(dtype)


def mean_of_integers(world_size: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return sum(integers(rank, shape, torch.float64) for rank in range(world_size)).div(world_size).to(dtype)


KINDS = {"fp32": "exact", "bf16": "16 bits", "fp16": "16 bits"}


class Mlp(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 5)
        ).to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Conv(nn.Module):
    """A model with parameters in channels_last order: their order in memory is not their logical order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 12, 3), nn.Flatten(), nn.Linear(12 * 16, 5)
        ).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.to(memory_format=torch.channels_last))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(10, 33, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(33, 5, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.a @ self.b).abs()


class Sparse(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16, sparse=sparse)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = (x[:, :3].abs() * 10).long() % 40
        return self.head(self.embedding(index).mean(1))


class Mixed(nn.Module):
    """A model with parameters of four dtypes: DDP gives each dtype its own buckets."""

    def __init__(self) -> None:
        super().__init__()
        dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
        self.layers = nn.ModuleList(nn.Linear(10, 10).to(dtype) for dtype in dtypes)
        self.head = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return self.head(x.float())


class Branches(nn.Module):
    """No rank uses `never`. A rank uses `even` if its rank plus the step is even, and else `odd`."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(10, 16)
        self.even = nn.Linear(16, 16)
        self.odd = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 5)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        branch = self.even if (dist.get_rank() + self.step) % 2 == 0 else self.odd
        return self.head(torch.relu(branch(torch.relu(self.trunk(x)))))


class MeanOverRanks(torch.autograd.Function):
    """Communicates on the default group in the forward and the backward pass, as SyncBatchNorm does on accelerators."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x / dist.get_world_size()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient / dist.get_world_size()


class Synchronized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(10 if i == 0 else 32, 32) for i in range(4))
        self.head = nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.relu(x - MeanOverRanks.apply(x.mean(0)))
        return self.head(x)


SMALL_BUCKETS = {"bucket_cap_mb": 0.01}


def threads_of_engine() -> int:
    """The number of engine threads in this process. Channel threads do not count: they exist as long as any object
    holds the handle."""
    of_python = {thread.native_id: thread.name for thread in threading.enumerate()}
    names = [name for name in of_python.values() if name == "fc-watch"]
    for thread in {*os.listdir("/proc/self/task")} - {*map(str, of_python)}:
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/comm") as file:
            names.append(file.read())
    of_channels = ("fc-post", "fc-wait")
    return sum(name.startswith("fc-") and name.strip() not in of_channels for name in names)


def threads_settle_at(wanted: int) -> int:
    """The number of engine threads, once it is `wanted` or after two seconds: dropped engines take time to end."""
    deadline = time.monotonic() + patient(2)
    while (found := threads_of_engine()) != wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def wrapped(ours: bool, module: nn.Module, **kwargs) -> nn.Module:
    """The module in a DataParallel that has DDP's bits, or in DDP."""
    if ours:
        return fusedcomm.DataParallel(module, config="fp32", quiet=True, **kwargs)
    return DistributedDataParallel(module, **kwargs)


class Normalised(nn.Module):
    """Buffers: running means and a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
