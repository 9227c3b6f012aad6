"""Single scenes of the rules of agreement, in the simulated network of test_members_agree.py."""

import collections

from test_members_agree import World

from fusedcomm.members.plane import agreement


def flow(world: World, *without: tuple[str, str]) -> None:
    """Delivers all messages but those of the links `without`, and stops steps where that is asked."""
    while True:
        for process in world.alive():
            while process.stops:
                process.stops.pop(0)()
        waiting = [link for link, queue in world.links.items() if queue and link not in without]
        if not waiting:
            return
        world.pass_on(*waiting[0])


def with_joiner(*late: tuple[str, str]) -> World:
    """p0 to p3 are ready for view 1 with the joiner p4, which is ready, too; messages of the links `late` are late."""
    world = World(0, num_founders=4, kinds="")
    joiner = world.add("p4")
    joiner.waits_to_join = False
    tell_states(world)
    world.processes["p0"].rules.add_joiner(joiner.member)
    flow(world)
    for process in world.alive():
        assert process.rules.view.uids == ("p0", "p1", "p2", "p3", "p4")
        process.rules.set_ready(1)
    flow(world, *late)
    return world


def test_a_change_costs_a_member_of_a_large_group_few_messages(monkeypatch):
    world = World(0, num_founders=100, kinds="")
    sent = collections.Counter()
    send = world.send

    def count(source: str, target: str, message: dict) -> None:
        sent[source, message["type"]] += 1
        send(source, target, message)

    monkeypatch.setattr(world, "send", count)
    world.processes["p7"].ended = True  # of the second level of the tree
    for process in world.alive():
        process.prove("p7")
    flow(world)
    for process in world.alive():
        assert process.rules.view.number == 1 and len(process.rules.view.uids) == 99
        process.rules.set_ready(1)
    flow(world)
    assert {process.rules.roster.active.number for process in world.alive()} == {1}
    assert sum(sent.values()) < 12 * 100
    assert max(number for (_, kind), number in sent.items() if kind == "commit") <= agreement.FAN_OUT


def tell_states(world: World) -> None:
    for process in world.alive():
        process.broadcast(process.rules.state())
    flow(world)


def lose(world: World, uid: str) -> None:
    world.processes[uid].ended = True
    world.processes["p0"].prove(uid)


def test_a_view_that_becomes_active_while_another_rank_is_lost_keeps_its_joiner():
    world = with_joiner(*(("p1", uid) for uid in ("p0", "p2", "p3", "p4")))
    lose(world, "p3")  # only p1 knows that the view is active
    flow(world)
    assert world.processes["p0"].rules.view.uids == ("p0", "p1", "p2", "p4")


def test_a_joiner_that_is_left_out_before_it_has_run_joins_anew():
    joiner = with_joiner().processes["p4"]
    # It knows that its view is active, but its main thread has not looked.
    assert joiner.uid in joiner.rules.roster.active
    joiner.rules.expelled(2)
    assert joiner.barrier.failure is None and joiner.uid == "p4+" and joiner.waits_to_join
