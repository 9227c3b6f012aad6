"""LocalSteps where steps, merges and messages are work of an accelerator's streams; see tests/helpers/on_streams.py."""

import dataclasses
import types

import on_streams
import pytest
import torch
from plain_simulation import Run, simulated
from sampling import few
from test_local_steps import flat, local_steps

from fusedcomm.config import Chunks, Config
from fusedcomm.local_steps import windows

CASES = [
    (merge, delay, fragments)
    for merge, delays in (("corrected", (0, 1, 5)), ("nesterov", (0, 1, 5)), ("average", (0,)))
    for delay in delays
    for fragments in (1, 4)
]


def trained(rank, world_size, run, wire):
    """(parameters after each step; how often the host has waited for the device in each step of the optimizer; the
    fragments' merged states and the parameters after finish(); on rank 0 simulated())."""
    model = run.model().to(on_streams.DEVICE)
    optimizer = run.optimizer(model)
    comm = local_steps(run, model, optimizer, Config(wire, sum="two-shot", chunks=Chunks(nbytes=4096, in_flight=2)))
    seen, waits = [], []
    for step in range(1, run.steps + 1):
        optimizer.zero_grad()
        run.loss(model, rank, step).backward()
        before = on_streams.waits()
        optimizer.step()
        waits.append(on_streams.waits() - before)
        seen.append(flat(model).clone())
    comm.finish()
    merged = [*(fragment.anchor.cpu() for fragment in comm.fragments), flat(model).cpu()]
    comm.detach()
    return [each.cpu() for each in seen], waits, merged, simulated(run, world_size)[0] if rank == 0 else None


def merges_in(run, step):
    """How many merges end in a step."""
    return sum(run.has_turn(fragment, step - run.delay) for fragment in range(run.fragments))


@pytest.mark.parametrize("case", few(CASES, ("corrected", 5, 4), ("nesterov", 1, 4), ("average", 0, 1)), ids=str)
def test_each_rule_does_what_a_plain_simulation_does(ranks_on_streams, case):
    merge, delay, fragments = case
    run = Run(merge, every=7, delay=delay, fragments=fragments, steps=15, width=100)
    outcomes = ranks_on_streams.run(trained, run, "fp32", world_size=2)
    for (seen, waits, merged, _), expected in zip(outcomes, outcomes[0][3], strict=True):
        for step, (ours, plain) in enumerate(zip(seen, expected, strict=True), start=1):
            assert (ours - plain).abs().max() <= 2e-6 * plain.abs().max(), step
            # The host waits where a merge ends, to compare checksums; never where it begins.
            assert waits[step - 1] == merges_in(run, step), step
        assert all(torch.equal(ours, first) for ours, first in zip(merged, outcomes[0][2], strict=True))


def in_windows(rank, world_size, run):
    """Parameters after each step, on a clock that advances by a second in each. A message has arrived when it is
    read."""
    steps = [0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(windows, "time", types.SimpleNamespace(monotonic=lambda: float(steps[0])))
        model = run.model().to(on_streams.DEVICE)
        optimizer = run.optimizer(model)
        comm = local_steps(dataclasses.replace(run, every=f"{run.every}s"), model, optimizer)
        seen = []
        for steps[0] in range(1, run.steps + 1):
            run.step(model, optimizer, rank, steps[0])
            seen.append(flat(model).cpu())
        comm.detach()
    return seen, simulated(run, world_size)[0][rank]


def test_windows_of_time_begin_when_a_message_is_read(ranks_on_streams):
    for seen, expected in ranks_on_streams.run(in_windows, Run("corrected", every=4, delay=0, steps=10), world_size=2):
        for ours, plain in zip(seen, expected, strict=True):
            assert (ours - plain).abs().max() <= 2e-6 * plain.abs().max()


def test_merges_in_bf16_give_all_ranks_the_same_bits(ranks_on_streams):
    run = Run("corrected", every=4, delay=2, fragments=2, steps=10, width=100)
    first, other = ranks_on_streams.run(trained, run, "bf16", world_size=2)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first[2], other[2], strict=True))
    plain = first[3]
    for rank, (seen, *_) in enumerate((first, other)):
        assert (seen[-1] - plain[rank][-1]).abs().max() <= 0.02 * plain[rank][-1].abs().max()
