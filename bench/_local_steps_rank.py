"""One rank of bench/local_steps.py: trains the same model in every way, one after another, and writes rows as JSON."""

import itertools
import re
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from lib.characters import Characters, Transformer, character_loss
from lib.rank import started
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging import averagers
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import Config, Feedback

ALONE = "no communication"
POST_LOCAL = "post-local SGD"
POWER_SGD_RANK, FIRST_COMPRESSED_STEP = 4, 10
USUAL_DELAY = 5
"""Steps; not in the names of ways."""


def local(config="fp32", **kwargs):
    return {"config": config, **kwargs}


def ways(every: int, delay: int) -> dict[str, dict | None]:
    """What LocalSteps is given for each way; None for those that synchronize every step, and torch's own."""
    late = min(delay, every - 1)
    found = {
        ALONE: None,
        "DDP": None,
        "int4 every step": None,
        "PowerSGD": None,
        f"H={every} {POST_LOCAL}": None,
        f"H={every} average": local(delay=0),
        f"H={every} corrected": local(delay=late),
        f"H={every} corrected int8": local("int8", delay=late),
        f"H={every} corrected int4": local("int4", delay=late),
    }
    if delay == USUAL_DELAY:
        return found
    return {f"{way}, {late} late" if given and given.get("delay") else way: given for way, given in found.items()}


def held_out(model: nn.Module, characters: Characters) -> float:
    """Loss for each held-out character. Each rank computes a part."""
    batches = characters.batches(seed=99 + dist.get_rank(), batch=64, test=True)
    with torch.no_grad():
        loss = torch.stack([character_loss(model, next(batches)) for _ in range(4)]).mean()
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def mean_model(model: nn.Module, settings: dict) -> nn.Module:
    """Of all ranks."""
    copy = Transformer(settings["width"], settings["depth"])
    with torch.no_grad():
        for ours, theirs in zip(copy.parameters(), model.parameters(), strict=True):
            mean = theirs.detach().clone()
            dist.all_reduce(mean)
            ours.copy_(mean / dist.get_world_size())
    return copy


def trained_on(model: nn.Module, seed: int, settings: dict, characters: Characters) -> dict[str, float]:
    """Trains the model, the same on every rank, on English prose: DDP in fp32 for every way, with a third of the
    learning rate. Returns the held-out losses of the prose, "finetuned", and of what it was trained on before."""
    texts = [text for topic, text in topics.items() if topic != "debugger"]  # has lines of pdb.py
    prose = Characters("".join(texts).encode("ascii", "ignore"))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=settings["lr"] / 3)
    batches = prose.batches(1000 * seed + 500 + dist.get_rank(), settings["batch"])
    for _ in range(settings["finetune"]):
        optimizer.zero_grad()
        character_loss(ddp, next(batches)).backward()
        optimizer.step()
    return {"finetuned": held_out(model, prose), "forgot": held_out(model, characters)}


def torchs_own(
    way: str, every: int, steps: int, ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer
) -> tuple[torch.optim.Optimizer, Callable[[], int]]:
    """Registers PowerSGD or post-local SGD. Returns the optimizer to use, and what counts the elements that ranks have
    summed."""
    numel = sum(parameter.numel() for parameter in ddp.parameters())
    if way == "PowerSGD":
        power = powerSGD_hook.PowerSGDState(None, POWER_SGD_RANK, start_powerSGD_iter=FIRST_COMPRESSED_STEP)
        ddp.register_comm_hook(power, powerSGD_hook.powerSGD_hook)
        return optimizer, lambda: FIRST_COMPRESSED_STEP * numel + int(power.compression_stats()[2])
    first = steps // 10  # averages gradients until then, as its authors advise
    own, _ = dist.new_subgroups(1)
    ddp.register_comm_hook(
        post_localSGD_hook.PostLocalSGDState(None, own, first), post_localSGD_hook.post_localSGD_hook
    )
    averager = averagers.PeriodicModelAverager(period=every, warmup_steps=first)
    merges = len(range(first, steps, every))
    return PostLocalSGDOptimizer(optimizer, averager), lambda: (first + merges) * numel


def train(way: str, given: dict | None, every: int, seed: int, settings: dict, characters: Characters) -> dict:
    torch.manual_seed(seed)
    model: nn.Module = Transformer(settings["width"], settings["depth"])
    inner, comm = model, None
    is_torchs = way == "PowerSGD" or way.endswith(POST_LOCAL)
    if way in ("DDP", "int4 every step") or is_torchs:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if way == "int4 every step":
        comm = fusedcomm.attach(model, Config("int4", feedback=Feedback()), quiet=True)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=settings["lr"])

    def summed() -> int:
        return sum(p.numel() for p in inner.parameters()) * settings["steps"] * (way == "DDP")

    if is_torchs:
        optimizer, summed = torchs_own(way, every, settings["steps"], model, optimizer)
    steps = fusedcomm.LocalSteps(inner, optimizer, every, quiet=True, **given) if given is not None else None
    batches = characters.batches(1000 * seed + dist.get_rank(), settings["batch"])
    curve, seconds = [], 0.0
    dist.barrier()
    for step in range(1, settings["steps"] + 1):
        begin = time.perf_counter()
        optimizer.zero_grad()
        character_loss(model, next(batches)).backward()
        optimizer.step()
        seconds += time.perf_counter() - begin
        if step % settings["look_every"] == 0:
            curve.append((step, round(seconds, 3), held_out(mean_model(inner, settings), characters)))
            dist.barrier()
    begin = time.perf_counter()
    if steps is not None:
        steps.finish()
    seconds += time.perf_counter() - begin
    stats = steps.stats() if steps is not None else comm.stats() if comm is not None else None
    others = dist.get_world_size() - 1
    sent = stats.sent_nbytes if stats is not None else 2 * 4 * summed() * others // dist.get_world_size()
    trained = mean_model(inner, settings)
    row = {
        "way": way,
        "seed": seed,
        "loss": held_out(trained, characters),
        "curve": curve,
        "steps_per_s": settings["steps"] / seconds,
        "sent_nbytes": sent,
    }
    for each in (steps, comm):
        if each is not None:
            each.detach()
    if settings["finetune"]:
        row |= trained_on(trained, seed, settings, characters)
    return row


def main() -> None:
    with started() as (settings, hand_over):
        characters, rows = Characters(), []
        wanted = {}  # by name, which has H and the delay if the way has them
        for every, delay in itertools.product(settings["every"], settings["delay"]):
            wanted |= {way: (given, every) for way, given in ways(every, delay).items()}
        for way, (given, every) in wanted.items():
            if settings["ways"] and not any(re.search(pattern, way) for pattern in settings["ways"]):
                continue
            for seed in range(settings["seeds"]):
                rows.append(train(way, given, every, seed, settings, characters))
                hand_over(rows, f"{way:36} seed {seed}  {rows[-1]['loss']:.4f}")


if __name__ == "__main__":
    main()
