"""What many benchmarks train: a small transformer, and the characters of Python's standard library."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Characters:
    """A text as ASCII codes: 19 of 20 to train on, the last one to test. The text is `data`, or else the top-level
    modules of Python's standard library."""

    CONTEXT = 64

    def __init__(self, data: bytes | None = None) -> None:
        if data is None:
            files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
            data = b"".join(path.read_bytes() for path in files)
        codes = torch.tensor([code for code in data if code < 128], dtype=torch.uint8)
        self.train, self.test = codes[: len(codes) * 19 // 20], codes[len(codes) * 19 // 20 :]

    def batches(self, seed: int, batch: int, test: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless pairs of inputs and targets, int64 [batch, CONTEXT], at random places."""
        generator = torch.Generator().manual_seed(seed)
        codes = self.test if test else self.train
        while True:
            starts = torch.randint(len(codes) - self.CONTEXT, (batch, 1), generator=generator)
            windows = codes[starts + torch.arange(self.CONTEXT + 1)].long()
            yield windows[:, :-1], windows[:, 1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, context, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A decoder with 121,000 parameters."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(128, width), nn.Embedding(Characters.CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.codes(x) + self.places.weight)))


def character_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
