"""bench/members.py --parts loss --every H: a rank of local steps is killed, or stopped for three windows.

The transformer of bench/accuracy.py; each rank draws its own data. Runs are compared by the loss of the merged model.
"""

import argparse
import itertools
import os
import random
import signal
import tempfile
import time
from pathlib import Path

import torch
from _members_loss import begin
from lib.characters import Transformer, character_loss
from lib.common import Report
from lib.job import Job, JobError

import fusedcomm
from fusedcomm import members as _package  # noqa: F401  (imported before ranks are forked)
from fusedcomm.local_steps import local_steps as _merges  # noqa: F401

UNDISTURBED, KILLED, STOPPED = "undisturbed", "killed", "stopped"
BATCH = 8
SLOW_STEP_S = 0.2
"""Added to a step while a stopped rank is missing, so that it is back before the others have ended."""
STOPPED_WINDOWS = 3


def train(pipe: str, options: argparse.Namespace, address: str | None) -> None:
    """The process of a rank. With `address`, a member's, it joins."""
    say, characters, test = begin(pipe, options, address is None)
    members = fusedcomm.Members(join=address)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    comm = fusedcomm.LocalSteps(model, optimizer, options.every, config=options.wire, members=members, quiet=True)
    members.carry(optimizer=optimizer)
    batches = characters.batches(1000 * options.seed + options.place, BATCH)
    try:
        while comm.steps < options.steps:
            if members.size < options.ranks and options.event == STOPPED:
                time.sleep(SLOW_STEP_S)
            optimizer.zero_grad()
            character_loss(model, next(batches)).backward()
            optimizer.step()
            # Parameters differ between merges, so no digest of them is told.
            say(step=comm.steps, size=members.size, digest="", address=members.address)
        comm.finish()
    except fusedcomm.ExpelledError:
        say(expelled=True, step=comm.steps)
        os._exit(0)
    with torch.no_grad():
        say(ended=True, loss=character_loss(model, test).item())
    members.leave()
    os._exit(0)


def disturb(job: Job, options: dict) -> int:
    """Kills or stops a rank within a window; a stopped one comes back, is expelled, and joins anew. Returns how many
    ranks end."""

    def last_step() -> int:
        return max(job.steps[pid][-1]["step"] for pid in job.alive)

    at = options["steps"] // 3
    job.wait_for(f"step {at}", lambda: len(job.alive) == options["ranks"] and last_step() >= at)
    is_stop = options["event"] == STOPPED
    victim, _ = job.kill_one(within_s=0.1, by=signal.SIGSTOP if is_stop else signal.SIGKILL)
    if not is_stop:
        return options["ranks"] - 1
    until = job.steps[victim][-1]["step"] + STOPPED_WINDOWS * options["every"]
    job.wait_for(f"step {until}", lambda: last_step() >= until)
    os.kill(victim, signal.SIGCONT)
    job.wait_for("the stopped rank", lambda: any("expelled" in told for told in job.told))
    address = job.steps[min(job.alive)][-1]["address"]
    joiner = argparse.Namespace(**options, place=options["ranks"])
    pid = job.fork("_members_local", train, job.pipe, joiner, address)
    job.wait_for("its return", lambda: pid in job.steps)
    return options["ranks"]


def run(arguments: argparse.Namespace, seed: int, ranks: int, event: str) -> dict:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), arguments.timeout, random.Random(seed))
        options = {"ranks": ranks, "folder": folder, "seed": seed, "event": event}
        options |= {name: getattr(arguments, name) for name in ("steps", "every", "wire")}
        try:
            for place in range(ranks):
                job.fork("_members_local", train, job.pipe, argparse.Namespace(**options, place=place), None)
            left = disturb(job, options) if event != UNDISTURBED else ranks
            job.wait_for("the end", lambda: sum("ended" in told for told in job.told) == left)
        finally:
            job.end()
    ended = [told for told in job.told if "ended" in told]
    of_a_survivor = job.steps[min(job.alive)]
    return {
        "seed": seed,
        "ranks": ranks,
        "event": event,
        "loss": ended[0]["loss"],
        "steps_with_fewer_ranks": sum(told["size"] < ranks for told in of_a_survivor),
        "checked": len({told["loss"] for told in ended}) == 1,
        "seconds": round(time.monotonic() - began),
        "load": os.getloadavg()[0],
    }


def loss(arguments: argparse.Namespace, report: Report) -> None:
    runs = report.extra["local_steps_runs"] = []
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    kinds = [(arguments.ranks, event) for event in (UNDISTURBED, KILLED, STOPPED)] + [
        (arguments.ranks - 1, UNDISTURBED)
    ]
    for seed, (ranks, event) in itertools.product(seeds, kinds):
        try:
            runs.append(run(arguments, seed, ranks, event))
        except JobError as error:
            report.missing("loss", f"seed {seed}, {ranks} ranks, {event}", error)
            print(error)
            continue
        if not runs[-1]["checked"]:
            report.wrong.append(f"loss, seed {seed}, {event}")
        report.write()
        print(f"loss {runs[-1]}", flush=True)
