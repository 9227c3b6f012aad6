"""LocalSteps: each merge rule against a plain simulation, and ranks that stay bit-identical."""

import fake_cuda
import pytest
import torch
from plain_simulation import OUTER, Run, simulated

import fusedcomm
from fusedcomm.config import Chunks, Config, Feedback


def local_steps(run, model, optimizer, config="fp32", **kwargs):
    if run.merge == "nesterov":
        kwargs["outer"] = lambda parameters: torch.optim.SGD(parameters, **OUTER)
    return fusedcomm.LocalSteps(
        model,
        optimizer,
        run.every,
        delay=run.delay,
        merge=run.merge,
        fragments=run.fragments,
        config=config,
        quiet=True,
        **kwargs,
    )


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def trained(rank, world_size, runs, config="fp32"):
    """For each run: (the parameters after each step, the fragments' merged states at the end)."""
    found = []
    for run in runs:
        model = run.model()
        optimizer = run.optimizer(model)
        comm = local_steps(run, model, optimizer, config)
        seen = []
        for step in range(1, run.steps + 1):
            run.step(model, optimizer, rank, step)
            seen.append(flat(model).clone())
        found.append((seen, [fragment.anchor.clone() for fragment in comm.fragments]))
        comm.detach()
    return found


def simulated_too(rank, world_size, run):
    """trained() of one run, and on rank 0 simulated()."""
    (found,) = trained(rank, world_size, [run])
    return (*found, simulated(run, world_size) if rank == 0 else None)


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("fragments", [1, 4])
@pytest.mark.parametrize(
    ("merge", "delay"),
    [(merge, delay) for merge in ("corrected", "nesterov") for delay in (0, 1, 5)] + [("average", 0)],
)
def test_each_rule_does_what_a_plain_simulation_does(ranks, merge, delay, fragments, world_size):
    run = Run(merge, every=7, delay=delay, fragments=fragments, steps=20)
    outcomes = ranks.run(simulated_too, run, world_size=world_size)
    expected, merged = outcomes[0][2]
    for rank, (seen, anchors, _) in enumerate(outcomes):
        for step, (ours, plain) in enumerate(zip(seen, expected[rank], strict=True)):
            assert (ours - plain).abs().max() <= 2e-6 * plain.abs().max(), (rank, step)
        assert [a.tolist() for a in anchors] == [a.tolist() for a in outcomes[0][1]]
    total = sum(anchor.double().sum().item() for anchor in outcomes[0][1])
    assert total == pytest.approx(sum(anchor.sum().item() for anchor in merged), rel=1e-5)


LOSSY = [
    Run("corrected", every=5, delay=2, fragments=2, width=100),
    Run("nesterov", every=4, delay=1, width=100),
    Run("average", every=3, delay=0, width=100),
]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("wire", ["int4", "bf16"])
def test_the_merged_state_has_the_same_bits_on_every_rank(ranks, world_size, wire):
    outcomes = ranks.run(trained, LOSSY, wire, world_size=world_size)
    for index in range(len(LOSSY)):
        for _, anchors in (outcome[index] for outcome in outcomes):
            for ours, first in zip(anchors, outcomes[0][index][1], strict=True):
                assert torch.equal(ours, first)
    for step in range(2, LOSSY[2].steps, 3):  # after an average the parameters are the merged state
        for outcome in outcomes:
            assert torch.equal(outcome[2][0][step], outcomes[0][2][0][step])


def on_the_kernels(rank, world_size, library, wire):
    """trained() of two merges on the CPU path, or with a `library` on the CUDA path, in one chunk."""
    config = Config(wire, sum="two-shot", feedback=Feedback(decay=0.95), chunks=Chunks(1 << 20))
    with fake_cuda.path(library, config) as driver:
        found = trained(rank, world_size, [Run("corrected", every=3, delay=1, steps=7, width=100)], config)
        assert driver is None or {kernel for kernel, _ in driver.launches} >= {"pack", "reduce", "unpack"}
        return found


@pytest.mark.parametrize("wire", ["int4"])
def test_the_gpus_kernels_merge_to_the_cpus_bits(ranks, kernels_library, wire):
    cpu, cuda = (ranks.run(on_the_kernels, driver, wire, world_size=2) for driver in (None, kernels_library))
    for own, other in zip(cpu, cuda, strict=True):
        for (seen, anchors), (their_seen, their_anchors) in zip(own, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(seen + anchors, their_seen + their_anchors, strict=True))
