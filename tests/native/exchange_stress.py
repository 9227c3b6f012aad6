"""Runs exchanges under a sanitizer: several ranks in one process, over gloo. The exchange is built with the sanitizer,
and gloo, torch and Python are not. A peer that is lost: tests/transport/test_exchange.py.

    exchange_stress.py FOLDER    the folder with the module of bindings.cpp; run_sanitizers.sh makes it
"""

import datetime
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from native_bindings import load  # noqa: E402

NUM_RANKS, NUM_EXCHANGES, UNDER_WAY = 3, 120, 8
TIMEOUT = datetime.timedelta(seconds=120)


def sent(rank: int, to: int, number: int) -> torch.Tensor:
    """What a rank sends another one in an exchange: uint8 [1 + 37·number]."""
    return torch.full((1 + 37 * number,), (rank * 61 + to * 17 + number * 7) % 256, dtype=torch.uint8)


def steady(exchange, rank: int) -> None:
    """Every message arrives where it belongs, with several exchanges under way."""
    under_way = []
    for number in range(NUM_EXCHANGES + UNDER_WAY):
        if number >= UNDER_WAY:
            expected, receive, ended = under_way.pop(0)
            ended.wait()
            assert torch.equal(receive, expected), f"rank {rank}, exchange {number - UNDER_WAY}"
        if number < NUM_EXCHANGES:
            send = torch.cat([sent(rank, to, number) for to in range(NUM_RANKS)])
            expected = torch.cat([sent(peer, rank, number) for peer in range(NUM_RANKS)])
            receive = torch.zeros_like(send)
            under_way.append((expected, receive, exchange.start(send=send, receive=receive)))


def closed(exchange, rank: int, num_begun: int, seconds: float) -> list:
    """Begins exchanges, of which the last rank begins only some. Returns them; the channel is then closed."""
    parts = [torch.zeros(3000, dtype=torch.uint8) for _ in range(2 * (num_begun if rank == NUM_RANKS - 1 else 12))]
    ended = [exchange.start(send=send, receive=receive) for send, receive in zip(parts[::2], parts[1::2], strict=True)]
    time.sleep(seconds)
    return ended


def failed(ended) -> bool:
    try:
        ended.wait()
    except RuntimeError:
        return True
    return False


def on_all_ranks(folder: Path, max_sending: int, body: Callable) -> list:
    """What body(exchange, rank) returns on each rank, when its exchange is closed."""
    store, found = dist.HashStore(), [None] * NUM_RANKS

    def run(rank: int) -> None:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("ranks", store), rank, NUM_RANKS, TIMEOUT)
        found[rank] = body(load(folder).Exchange(gloo, max_sending=max_sending), rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(NUM_RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def main(folder: Path) -> None:
    load(folder)
    for max_sending in (0, 2):
        assert (
            on_all_ranks(folder, max_sending, lambda exchange, rank: steady(exchange, rank) or "ended")
            == ["ended"] * NUM_RANKS
        )
        for repeat in range(20):
            begun = on_all_ranks(folder, max_sending, lambda *of, r=repeat: closed(*of, r % 5, 0.0003 * r))
            num_failed = [sum(map(failed, ended)) for ended in begun]
            assert sum(num_failed) >= (NUM_RANKS - 1) * (12 - 4), f"only {num_failed} exchanges noticed"
    print("exchange_stress: every message as expected", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
