"""The rules of agreement in a simulated network, in which everything happens in any order: members_world.py."""

import pytest
from members_world import World

from fusedcomm.members.plane import agreement


def check_liveness(world: World) -> None:
    """All that are left train in one view, and none waits."""
    members = [process for process in world.alive() if not process.waits_to_join]
    before = {process.uid: process.step for process in members}
    for _ in range(20):
        world.run(3000)
        if all(process.ended or process.step > before[process.uid] for process in members):
            break
    for process in members:
        view = process.view
        proposed = process.rules.proposal and (process.rules.proposal.participants, list(process.rules.proposal.acks))
        where = f"{proposed}, {process.uid} in mode {process.mode}, step {process.step}, {process.rules.state()}"
        assert process.ended or process.mode == "run", where
        assert process.ended or process.step > before[process.uid], f"{where}, {view.uids}"
    assert len({p.view.number for p in world.alive() if p.mode == "run"}) <= 1


def check(seed: int, kinds: str) -> None:
    world = World(seed, num_founders=1 + seed % 5, kinds=kinds)
    world.run(6000)
    world.settle()
    check_liveness(world)
    world.check_groups()
    if "c" not in kinds:
        assert world.alive()
        assert all(process.error is None for process in world.processes.values())


@pytest.mark.parametrize("fan_out", [agreement.FAN_OUT, 1])
@pytest.mark.parametrize("kinds", ["kj", "c", "ckj"])
def test_one_step_has_one_group(kinds, fan_out, request, monkeypatch):
    """kinds: k for deaths, c for cut links, j for joiners. fan_out: 1: what members do in groups larger than these."""
    monkeypatch.setattr(agreement, "FAN_OUT", fan_out)
    for seed in range(100 if request.config.getoption("--all") else 2):
        try:
            check(seed, kinds)
        except BaseException:
            print(f"kinds {kinds}, seed {seed}")
            raise
