"""Two ranks of Accelerate; see test_trainers.py."""

import sys
from pathlib import Path

import torch
import training
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import nn

from fusedcomm.integrations.accelerate import attach

FOLDER = Path(sys.argv[1])


def train(options: dict | None = None, resumed=False, saved=False) -> dict:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=training.ACCUMULATED,
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    model = training.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=training.LEARNING_RATE, momentum=0.9)
    loader = torch.utils.data.DataLoader(training.dataset(), training.BATCH, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    comm = attach(accelerator, model, **options) if options is not None else None
    first = training.RESUMED_AT * training.ACCUMULATED if resumed else 0
    if resumed:
        accelerator.load_state(FOLDER / "state")
        loader = accelerator.skip_first_batches(loader, first)
    losses = []
    for index, (inputs, labels) in enumerate(loader, first):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            losses.append(loss.item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), training.CLIPPED_TO)
            optimizer.step()
            optimizer.zero_grad()
        if saved and index + 1 == training.RESUMED_AT * training.ACCUMULATED:
            accelerator.save_state(FOLDER / "state")
    result = {"losses": losses, "digest": training.digest(model), "steps": training.NUM_STEPS}
    if comm is not None:
        result["synchronized"] = comm.stats().steps
        comm.detach()
    accelerator.free_memory()
    return result


def main() -> None:
    results = {"plain": train()}
    for wire in ("fp32", "int8"):
        results[wire] = train({"config": wire})
    for every_rank in (True, False):
        suffix = "every rank" if every_rank else "mean"
        options = {"config": training.FEEDBACK, "every_rank": every_rank}
        results[f"feedback, {suffix}"] = train(options, saved=True)
        results[f"resumed, {suffix}"] = train(options, resumed=True)
    training.write(FOLDER, results)


main()
