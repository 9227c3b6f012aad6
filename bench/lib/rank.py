"""A rank that hosts.rows_of_ranks has started."""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fusedcomm.ranks.groups import end_together


def gathered(value: Any) -> list:
    """Every rank's value, in rank order. A collective call."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def started() -> Iterator[tuple[dict, Callable[..., None]]]:
    """Context of the rank's work, over gloo with one thread. Gives it the settings, and hand_over(rows, said=""), which
    on rank 0 writes the rows so far and prints a line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    results, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")

    def hand_over(rows: list[dict], said: str = "") -> None:
        if dist.get_rank() == 0:
            results.write_text(json.dumps(rows))
            if said:
                print(said, flush=True)

    yield settings, hand_over
    end_together()
