"""Rows that say what is refused, and how they run: all rows of one number of ranks in one hand-over to the ranks."""

import gc
import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from models import refusal
from ranks import RankError, Ranks


class Row(NamedTuple):
    """One thing that is refused.

    Attributes:
        num_ranks: 0 runs it in the test's own process, without a process group.
        wrong: what is done. It is called with the rank, on every rank, and every rank must raise.
        starts: how the error's kind and text start, on all ranks but rank 1, and on rank 1. A kind alone, without a
            colon, is followed by ": fusedcomm".
        words: what every rank's text has. "{rank}" in it stands for that rank. The row's test id has the first one, or
            else the start.
        is_same: whether all ranks have one text, which names rank 1, the only one that differs, and not rank 2.
    """

    front_end: str
    num_ranks: int
    wrong: Callable[[int], object]
    starts: tuple[str, str]
    words: list[str]
    is_same: bool

    def __str__(self) -> str:
        return f"{self.front_end}: {(self.words or self.starts)[0][:80]}"

    def check(self, texts: list[str]) -> None:
        for rank, text in enumerate(texts):
            starts = self.starts[rank == 1]
            assert text.startswith(starts if ":" in starts else f"{starts}: fusedcomm"), text
            assert [word for word in self.words if word.replace("{rank}", str(rank)) not in text] == [], text
            if self.is_same:
                assert text == texts[0] and "rank 1" in text and "rank 2" not in text, texts


def rows(
    front_end: str, num_ranks: int, given: list[tuple[Callable[[int], object], str]], is_same: bool = False
) -> list[Row]:
    """Rows of (wrong, text): "start ... words ... words". The words may follow in any order. In "start / start" the
    second one is that of rank 1."""
    made = []
    for wrong, text in given:
        starts, *words = text.split(" ... ")
        first, _, second = starts.partition(" / ")
        made.append(Row(front_end, num_ranks, wrong, (first, second or first), words, is_same))
    return made


def differ(make: Callable, one: dict, other: dict) -> Callable[[int], object]:
    """What calls `make` with other keyword arguments on rank 1 than on the other ranks."""
    return lambda rank: make(**(other if rank == 1 else one))


def said(row: Row, rank: int) -> str:
    """The kind and the text of the error."""
    torch.manual_seed(5)
    return refusal(row.wrong, rank)


def said_by_rank(rank: int, world_size: int, module: str, indices: list[int]) -> dict[int, str]:
    table = importlib.import_module(module).ROWS
    found = {index: said(table[index], rank) for index in indices}
    gc.collect()  # a watch that outlives the group would wait for its store
    return found


def run_rows(ranks: Ranks, module: str, indices: list[int], num_ranks: int, folder: Path) -> None:
    """Writes {index of a row of the module's ROWS: every rank's text}. If a row ends the hand-over, each has its own,
    so that this row is the only one that fails."""
    found = {}
    try:
        texts = ranks.run(said_by_rank, module, indices, world_size=num_ranks)
        found = {index: [of_rank[index] for of_rank in texts] for index in indices}
    except RankError:
        for index in indices:
            outcomes = ranks.outcomes(said_by_rank, module, [index], world_size=num_ranks)
            found[index] = [value[index] if kind == "value" else f"{kind}: {value}" for kind, value in outcomes]
    (folder / "texts").write_bytes(pickle.dumps(found))
