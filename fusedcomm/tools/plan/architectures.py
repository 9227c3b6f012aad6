"""The models that ``fusedcomm plan`` offers by name.

A model is a list of parameters in the order in which modules register them. Each has its numel and its multiply-adds,
which determine when its gradient is ready. No weights are needed, and no torchvision.
"""

import dataclasses
from collections.abc import Callable, Iterator


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One parameter: how much there is to send, and how much to compute."""

    numel: int
    multiply_adds: int
    """Multiply-adds with it in a sample's forward pass; the backward pass does twice as many. 0 for a parameter that is
    looked up or added, which costs memory time only."""
    one_dimensional: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model's parameters in the order of registration. `sample` says in words what one sample is."""

    parameters: tuple[Parameter, ...]
    sample: str

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of one sample's forward pass, in convolutions and linear layers only."""
        return sum(parameter.multiply_adds for parameter in self.parameters)


def _vector(numel: int) -> Parameter:
    return Parameter(numel, 0, one_dimensional=True)


def _weight(numel: int, uses: int) -> Parameter:
    """A weight that a sample uses `uses` times: a convolution once for each position of its output, a linear layer once
    for each token."""
    return Parameter(numel, numel * uses)


def _linear(num_in: int, num_out: int, tokens: int = 1) -> Iterator[Parameter]:
    yield _weight(num_in * num_out, tokens)
    yield _vector(num_out)


def _conv_norm(num_in: int, num_out: int, kernel: tuple[int, int] | int, side: int) -> Iterator[Parameter]:
    """A convolution without bias, whose output has side² positions, and a batch norm."""
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    yield _weight(num_in * num_out * height * width, side * side)
    yield _vector(num_out)
    yield _vector(num_out)


def _vgg16() -> Iterator[Parameter]:
    num_in, side = 3, 224
    for width, num_layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(num_layers):
            yield _weight(num_in * width * 9, side * side)
            yield _vector(width)
            num_in = width
        side //= 2
    for num_in, num_out in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        yield from _linear(num_in, num_out)


def _resnet(*num_blocks: int) -> Iterator[Parameter]:
    """A ResNet of bottleneck blocks with the stride in the 3×3 convolution; images of 224²."""
    yield from _conv_norm(3, 64, 7, 112)
    num_in, side = 64, 56
    for stage, blocks in enumerate(num_blocks):
        width = 64 << stage
        for block in range(blocks):
            side_in, side = side, side // 2 if stage and block == 0 else side
            yield from _conv_norm(num_in, width, 1, side_in)
            yield from _conv_norm(width, width, 3, side)
            yield from _conv_norm(width, 4 * width, 1, side)
            if block == 0:
                yield from _conv_norm(num_in, 4 * width, 1, side)
            num_in = 4 * width
    yield from _linear(num_in, 1000)


# A branch of one of Inception V3's modules: a list of (output channels, kernel), or of (output channels, kernel, side
# of the output) where that differs from the module's side.
_Branch = list[tuple]


def _inception_a(pool: int) -> list[_Branch]:
    return [[(64, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)], [(pool, 1)]]


def _inception_c(width: int) -> list[_Branch]:
    row, column = (1, 7), (7, 1)
    return [
        [(192, 1)],
        [(width, 1), (width, row), (192, column)],
        [(width, 1), (width, column), (width, row), (width, column), (192, row)],
        [(192, 1)],
    ]


def _inception_v3() -> Iterator[Parameter]:
    """Inception V3 without the auxiliary classifier; images of 299²."""
    for num_in, num_out, kernel, side in (
        (3, 32, 3, 149),
        (32, 32, 3, 147),
        (32, 64, 3, 147),
        (64, 80, 1, 73),
        (80, 192, 3, 71),
    ):
        yield from _conv_norm(num_in, num_out, kernel, side)
    down_1 = [[(384, 3, 17)], [(64, 1, 35), (96, 3, 35), (96, 3, 17)]]
    down_2 = [[(192, 1, 17), (320, 3, 8)], [(192, 1, 17), (192, (1, 7), 17), (192, (7, 1), 17), (192, 3, 8)]]
    modules = [(192, 35, _inception_a(32)), (256, 35, _inception_a(64)), (288, 35, _inception_a(64))]
    modules.append((288, 17, down_1))
    modules += [(768, 17, _inception_c(width)) for width in (128, 160, 160, 192)]
    modules.append((768, 8, down_2))
    for num_in, side, branches in modules:
        for branch in branches:
            width = num_in
            for num_out, kernel, *other_side in branch:
                yield from _conv_norm(width, num_out, kernel, *(other_side or [side]))
                width = num_out
    for num_in in (1280, 2048):
        # Two branches of this module fork at their ends, so it is a list of convolutions instead of branches.
        for width, num_out, kernel in (
            (num_in, 320, 1),
            (num_in, 384, 1),
            (384, 384, (1, 3)),
            (384, 384, (3, 1)),
            (num_in, 448, 1),
            (448, 384, 3),
            (384, 384, (1, 3)),
            (384, 384, (3, 1)),
            (num_in, 192, 1),
        ):
            yield from _conv_norm(width, num_out, kernel, 8)
    yield from _linear(2048, 1000)


def _transformer(width: int, num_layers: int, tokens: int, fused_qkv: bool) -> Iterator[Parameter]:
    for _ in range(num_layers):
        for num_in, num_out in ([(width, 3 * width)] if fused_qkv else [(width, width)] * 3) + [(width, width)]:
            yield from _linear(num_in, num_out, tokens)
        yield from (_vector(width), _vector(width))
        yield from _linear(width, 4 * width, tokens)
        yield from _linear(4 * width, width, tokens)
        yield from (_vector(width), _vector(width))


def _bert(width: int, num_layers: int, tokens: int = 128) -> Iterator[Parameter]:
    """BERT with a pooler, without a pre-training head."""
    for rows in (30522, 512, 2):
        yield Parameter(rows * width, 0)
    yield from (_vector(width), _vector(width))
    yield from _transformer(width, num_layers, tokens, fused_qkv=False)
    yield from _linear(width, width)


def _gpt2(width: int, num_layers: int, tokens: int = 1024) -> Iterator[Parameter]:
    """GPT-2. Its head uses the weight of its embedding, so the gradient of that weight is ready last."""
    yield Parameter(50257 * width, 0)
    yield Parameter(1024 * width, 0)
    yield from _transformer(width, num_layers, tokens, fused_qkv=True)
    yield from (_vector(width), _vector(width))
    yield Parameter(0, 50257 * width * tokens)


_ARCHITECTURES: dict[str, tuple[str, Callable[[], Iterator[Parameter]]]] = {
    "resnet50": ("an image of 224²", lambda: _resnet(3, 4, 6, 3)),
    "resnet101": ("an image of 224²", lambda: _resnet(3, 4, 23, 3)),
    "resnet152": ("an image of 224²", lambda: _resnet(3, 8, 36, 3)),
    "inception-v3": ("an image of 299²", _inception_v3),
    "vgg16": ("an image of 224²", _vgg16),
    "bert-base": ("128 tokens", lambda: _bert(768, 12)),
    "bert-large": ("128 tokens", lambda: _bert(1024, 24)),
    "gpt2": ("1024 tokens", lambda: _gpt2(768, 12)),
    "gpt2-xl": ("1024 tokens", lambda: _gpt2(1600, 48)),
}
NAMES = tuple(_ARCHITECTURES)


def architecture(name: str) -> Architecture:
    """The model with this name, one of NAMES. Raises KeyError for any other name."""
    sample, parameters = _ARCHITECTURES[name]
    return Architecture(tuple(parameters()), sample)
