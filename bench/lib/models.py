"""Models of any numel: a residual network, a transformer, and a model that waits instead of computing. How much they
compute for a sample is chosen apart from their numel. They have no buffers, so ranks exchange nothing but gradients."""

import functools
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusedcomm.tools.probe.workload import Layer

NUM_CLASSES = 256
BLOCKS_PER_STAGE = 2
NUM_LAYERS = 4
CHANNELS_PER_GROUP = 8
WAIT_S = 1e-10
"""Seconds that a forward pass waits for each sample, unit of `size` and element of a weight. A backward pass takes
twice as long."""


class Block(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(num_out // CHANNELS_PER_GROUP, num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(num_out // CHANNELS_PER_GROUP, num_out)
        self.shortcut = nn.Identity() if num_in == num_out else nn.Conv2d(num_in, num_out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """A ResNet-18 for images of `size` × `size` pixels. It normalizes groups, since a batch may have only one image."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
        for stage, (num_in, num_out) in enumerate(zip(widths, widths[1:], strict=False)):
            layers.append(Block(num_in, num_out, 1 if stage == 0 else 2))
            layers += [Block(num_out, num_out, 1) for _ in range(BLOCKS_PER_STAGE - 1)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(8 * width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x).mean((2, 3)))

    def batch(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(samples, 3, self.size, self.size, generator=generator)
        return images, torch.randint(NUM_CLASSES, (samples,), generator=generator)


class Transformer(nn.Module):
    """Encoder layers over sequences of `size` bytes."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(NUM_CLASSES, width)
        layer = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, NUM_LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens))).flatten(0, 1)

    def batch(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(NUM_CLASSES, (samples, self.size + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()


class HandOver(Layer):
    """A layer whose gradient is in memory when its computation ends, as if an accelerator had written it."""

    @staticmethod
    def backward(context, output: Tensor) -> tuple:
        context.compute()
        # detach() returns a tensor that nothing else holds: autograd uses it as it is, and would copy any other.
        return output, context.gradient.detach(), None, None


class Waiting(nn.Module):
    """The matrices of a transformer's layers. Their computation uses no core, as if an accelerator did it, so
    communication cannot slow it by taking cores from it. The cores only run DDP's copies and the optimizer. Without
    bucket views DDP writes the mean into the gradients that are handed over."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.size = size
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * NUM_LAYERS
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
        self.gradients = [torch.randn(shape) for shape in shapes]

    def forward(self, samples: Tensor) -> Tensor:
        value = torch.zeros(1, NUM_CLASSES, requires_grad=True)
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            seconds = WAIT_S * len(samples) * self.size * weight.numel()
            time.sleep(seconds)
            value = HandOver.apply(value, weight, gradient, functools.partial(time.sleep, 2 * seconds))
        return value.expand(len(samples), -1)

    def batch(self, samples: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return torch.zeros(samples), torch.randint(NUM_CLASSES, (samples,), generator=generator)


MODELS: dict[str, tuple[Callable[[int, int], nn.Module], int]] = {
    "resnet": (ResNet, 8),
    "transformer": (Transformer, 32),
    "waiting": (Waiting, 16),
}
"""The constructor, which takes (width, size), and the number that a width must be a multiple of, by name."""


def numel_of(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def make_model(name: str, numel: int, size: int) -> nn.Module:
    """The model of this name whose numel is nearest to `numel`. It has the same values on every rank."""
    make, step = MODELS[name]

    def numel_at(steps: int) -> int:
        with torch.device("meta"):
            return numel_of(make(steps * step, size))

    low = 1
    while numel_at(2 * low) < numel:
        low *= 2
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if numel_at(middle) < numel else (low, middle)
    nearest = min((low, high), key=lambda steps: abs(math.log(numel_at(steps) / numel)))
    torch.manual_seed(0)
    return make(nearest * step, size)
