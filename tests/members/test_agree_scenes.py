"""Single scenes of the rules of agreement, in the simulated network of members_world.py."""

import collections

import pytest
from members_world import World

from fusedcomm.members.plane import agreement


@pytest.fixture
def sent(monkeypatch):
    """How often each (source, target, type of message) was sent."""
    found, send = collections.Counter(), World.send

    def count(world: World, source: str, target: str, message: dict) -> None:
        found[source, target, message["type"]] += 1
        send(world, source, target, message)

    monkeypatch.setattr(World, "send", count)
    return found


def with_joiner(*late: tuple[str, str]) -> World:
    """p0 to p3 are ready for view 1 with the joiner p4, which is ready, too; messages of the links `late` are late."""
    world = World(0, num_founders=4)
    world.tell_states()
    world.propose_joiner()
    world.flow()
    for process in world.alive():
        assert process.rules.view.uids == ("p0", "p1", "p2", "p3", "p4")
    world.make_ready(*late)
    return world


def test_a_change_costs_a_member_of_a_large_group_few_messages(sent):
    world = World(0, num_founders=100)
    world.lose("p7")  # of the second level of the tree
    world.flow()
    for process in world.alive():
        assert process.rules.view.number == 1 and len(process.rules.view.uids) == 99
    world.make_ready()
    assert {process.rules.roster.active.number for process in world.alive()} == {1}
    assert sent.total() < 12 * 100
    commits = collections.Counter(source for source, _, kind in sent.elements() if kind == "commit")
    assert max(commits.values()) <= agreement.FAN_OUT


def test_a_joiner_hears_its_view_from_the_member_that_it_is_connected_with(sent, monkeypatch):
    monkeypatch.setattr(agreement, "FAN_OUT", 1)  # in the tree it is below p3, which cannot reach it yet
    with_joiner()
    assert sent["p0", "p4", "commit"] == 1


def test_a_lost_member_is_named_until_all_are_in_a_view_without_it():
    world = World(0, num_founders=3)
    world.lose("p2", "p0")
    world.flow()
    assert all(process.rules.view.number == 1 for process in world.alive())
    assert "p2" in world.processes["p0"].rules.state()["dead"]
    world.make_ready()
    assert not any(process.rules.state()["dead"] for process in world.alive())


def test_a_view_that_becomes_active_while_another_rank_is_lost_keeps_its_joiner():
    world = with_joiner(*(("p1", uid) for uid in ("p0", "p2", "p3", "p4")))
    world.lose("p3", "p0")  # only p1 knows that the view is active
    world.flow()
    assert world.processes["p0"].rules.view.uids == ("p0", "p1", "p2", "p4")


def test_a_joiner_that_is_left_out_before_it_has_run_joins_anew():
    joiner = with_joiner().processes["p4"]
    # It knows that its view is active, but its main thread has not looked.
    assert joiner.uid in joiner.rules.roster.active
    joiner.rules.expelled(2)
    assert joiner.barrier.failure is None and joiner.uid == "p4+" and joiner.waits_to_join
