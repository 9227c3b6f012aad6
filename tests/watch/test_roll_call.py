"""The conclusions from the answers to a roll call: slow and missing ranks, cut links, and a store that is too slow."""

import dataclasses
import socket
import sys
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from fusedcomm.ranks import roll_call
from fusedcomm.ranks.answers import collect
from fusedcomm.ranks.bounded_store import BoundedStore
from fusedcomm.ranks.connections import connections
from fusedcomm.ranks.roll_call import CUT, FAILED, STALLED, Began, Opening, RollCall, State, conclude
from fusedcomm.ranks.watch import concerns

LABEL = "bucket 0 (layer.weight;\n1 parameters, 1 MiB)"
BUCKET = LABEL.replace("\n", " ")


def state(num_handed: int = 12, num_ended: int = 10, **fields: object) -> State:
    """A rank in the all-to-all of its oldest job, if it has one; a step has two jobs. fields: what else it says."""
    job: dict = {"last_step": num_ended // 2 - 1, "idle_s": 7.25}
    if num_handed > num_ended:
        job |= {"label": LABEL, "step": num_ended // 2, "num_chunks": 4, "waits_s": 3.0, "at": "stage", "chunk": 2}
        job |= {"stage": "all-to-all", "is_on_wire": True}
    return State(num_handed=num_handed, num_ended=num_ended, **(job | fields))


def at_work(stage: str = "pack", stage_s: float = 0.0) -> dict:
    return {"stage": stage, "is_on_wire": False, "stage_s": stage_s}


def in_call() -> State:
    return state(11, label="state_dict()", num_chunks=0)


WAITS = f"in step 5 for the all-to-all of chunk 3/4 of {BUCKET}, handed over 3.0 s ago"
PACKS, REDUCES = (WAITS.replace("for the all-to-all", f"with the {stage}") for stage in ("pack", "reduce"))
ALL_WAIT, NOT_1, NOT_2 = f"ranks 0, 1, 2, 3 wait {WAITS}", f"ranks 0, 2, 3 wait {WAITS}", f"ranks 0, 1, 3 wait {WAITS}"
NONE_BEHIND = "every rank answered and none is behind"
NETWORK = f"{NONE_BEHIND}: they wait for the network"
AT_WORK = f"{NONE_BEHIND}: some are at work, and the others wait for them"
GONE = "It is stopped, was killed, has left, is cut off, or is in a call that holds Python's interpreter"
MISSING_2 = f"rank 2 (process 1 on node) is missing: no answer within 2.0 s. {GONE}"
BEHIND_1 = f"rank 1 is slow: it has not handed over {BUCKET} of step 5; nothing under way for 7.2 s, since step 4"
CALL = "in step 5 for the others in state_dict(), called 3.0 s ago"


def absent_2() -> dict:
    """Rank 2 has not answered."""
    return {"absent": {2: "process 1 on node"}, "began": {2: Began(["127.0.0.1", "10.0.0.3"])}}


# By scene: what ranks say otherwise than state(), what is otherwise in the call, and the lines of the report. Of four
# ranks, on a host each unless their addresses are given.
SCENES: dict[str, tuple[dict, dict, list[str]]] = {
    "network": ({}, {}, [NETWORK, ALL_WAIT]),
    "over": ({rank: state(12, 12) for rank in range(4)}, {}, ["every rank answered, and none waits any more"]),
    "busy": (
        {2: at_work(stage_s=2.0)},
        {},
        [f"rank 2 is slow: in step 5 busy {PACKS.removeprefix('in step 5 ')}", NOT_2],
    ),
    "passing": ({2: at_work(stage_s=0.1)}, {}, [AT_WORK, f"rank 2 is busy {PACKS}", NOT_2]),
    "working": (
        {1: at_work(), 2: at_work("reduce")},
        {},
        [AT_WORK, f"rank 1 is busy {PACKS}", f"rank 2 is busy {REDUCES}", f"ranks 0, 3 wait {WAITS}"],
    ),
    "behind": (  # rank 3 has finished the job that the others wait for
        {1: state(10), 3: state(11, 11)},
        {},
        [BEHIND_1, f"ranks 0, 2 wait {WAITS}"],
    ),
    "not in a call": (
        {0: in_call(), 1: in_call(), 2: state(10), 3: in_call()},
        {},
        [
            BEHIND_1.replace("rank 1", "rank 2").replace(
                f"handed over {BUCKET} of step 5", "called state_dict(), as every rank has to"
            ),
            f"ranks 0, 1, 3 wait {CALL}",
        ],
    ),
    "all in a call": (dict.fromkeys(range(4), in_call()), {}, [NONE_BEHIND, f"ranks 0, 1, 2, 3 wait {CALL}"]),
    "one in a call": (
        {2: in_call()},
        {},
        ["the ranks are at different places, and wait for each other", NOT_2, f"rank 2 waits {CALL}"],
    ),
    "failed": (
        {3: state(12, 12, failure="the reduce\nfailed")},
        {},
        ["conclusive", "rank 3 has failed: the reduce failed", f"ranks 0, 1, 2 wait {WAITS}"],
    ),
    "queued": (
        {1: {"at": "queue"}},
        {},
        [NETWORK, NOT_1, f"rank 1 waits in step 5 for the next stage of {BUCKET}, handed over 3.0 s ago"],
    ),
    "streams": (
        {1: {"at": "stream"}},
        {},
        [NETWORK, NOT_1, f"rank 1 waits in step 5 for work on the device's streams of {BUCKET}, handed over 3.0 s ago"],
    ),
    "apart": (
        {rank: {"chunk": rank, "num_chunks": 9} for rank in range(9)},
        {"world_size": 9},
        [NETWORK, *(f"rank {rank} waits {WAITS.replace('3/4', f'{rank + 1}/9')}" for rank in range(8))]
        + ["1 more rank is waiting elsewhere"],
    ),
    "many": (
        {},
        {"world_size": 40, "absent": {rank: "process 1 on node" if rank > 20 else "" for rank in range(20, 40)}},
        ["conclusive", MISSING_2.replace("rank 2 (process 1 on node)", "rank 20 (which has no watch)")]
        + [MISSING_2.replace("rank 2", f"rank {rank}") for rank in range(21, 28)]
        + ["12 more ranks are missing", f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more wait {WAITS}"],
    ),
    "late": (
        {},
        {"late_s": {2: 1.75}},
        ["rank 2 is slow: it took 1.8 s to answer, as if its process had been stopped", ALL_WAIT],
    ),
    "unread and missing": (
        {},
        {"unread": [1], "absent": {2: "process 1 on node"}},
        ["1 answer not read in time, of rank 1: the store is slow", MISSING_2, f"ranks 0, 3 wait {WAITS}"],
    ),
    "unreadable": (
        {},
        {"unreadable": {1: "it is cut off"}},
        ["rank 1 answered, but its answer cannot be read: it is cut off", NOT_1],
    ),
    # ---- links
    "cut": (  # and rank 0's link drops a packet now and then
        {
            1: {"unacked_s": {"10.0.0.3": 4.21, "10.0.0.1": 1.9}},
            2: {"unacked_s": {"10.0.0.2": 4.04, "127.0.0.1": 9.0}},
        },
        {},
        [
            "the link between rank 1 and rank 2 carries nothing: what rank 1 sent has not been acknowledged for 4.2 s, "
            "and what rank 2 sent has not been acknowledged for 4.0 s",
            NETWORK,
            ALL_WAIT,
        ],
    ),
    "host down": (
        {rank: {"unacked_s": {"10.0.0.3": 6.0 + rank / 10}} for rank in (0, 1)},
        absent_2(),
        [
            "conclusive",
            "rank 2 (process 1 on node) is missing: no answer within 2.0 s, and its host has not acknowledged for 6.1 "
            "s what was sent to it. That host is down or cut off",
            NOT_2,
        ],
    ),
    "a neighbour on its host is heard": (
        {3: {"own": ["10.0.0.3"]}, 0: {"unacked_s": {"10.0.0.3": 1.0}}},
        absent_2(),
        ["conclusive", MISSING_2, NOT_2],
    ),
    "killed": ({}, absent_2(), ["conclusive", MISSING_2, NOT_2]),
}


def call_of(scene: str) -> RollCall:
    said, fields, _ = SCENES[scene]
    call = RollCall(5, fields.get("world_size", 4), Opening(0, STALLED, "where nothing has moved for 0.0 s"), 2.0)
    for name, value in fields.items():
        setattr(call, name, value)
    silent = {*call.absent, *call.unread, *call.unreadable}
    for rank in sorted({*range(call.world_size)} - silent):
        says = said.get(rank, {})
        answer = says if isinstance(says, State) else dataclasses.replace(state(), **says)
        answer.own = answer.own or ["127.0.0.1", f"10.0.0.{rank + 1}"]
        call.answers[rank] = roll_call.decode(State, roll_call.encode(answer).encode())
    return call


@pytest.mark.parametrize("scene", SCENES)
def test_the_report_says_what_the_answers_say(scene):
    call = call_of(scene)
    found = conclude(call)
    head, *lines = found.text.splitlines()
    opened = "opened by rank 0, where nothing has moved for 0.0 s"
    assert head == f"fusedcomm: roll call 5 of {call.world_size} ranks, {opened}"
    expected = SCENES[scene][2]
    assert sorted(line.strip() for line in lines) == sorted(line for line in expected if line != "conclusive")
    assert found.is_conclusive == ("conclusive" in expected)


@pytest.mark.parametrize("words", ["after a failure: ", "conclusive\n", "pack", "state_dict()", "opened by rank 2, "])
def test_the_words_of_labels_change_nothing_that_is_concluded(words):
    for scene in SCENES:
        call = call_of(scene)
        expected = conclude(call)
        for answer in call.answers.values():
            answer.label = words if answer.label == LABEL else answer.label
        found = conclude(call)
        said = expected.text.replace(BUCKET, words.replace("\n", " "))
        assert sorted(found.text.splitlines()) == sorted(said.splitlines())
        assert (found.is_conclusive, found.slow) == (expected.is_conclusive, expected.slow)


def test_what_is_cut_off_or_of_another_kind_cannot_be_read():
    whole = roll_call.encode(state(own=["10.0.0.1"], unacked_s={"10.0.0.2": 3.0}))
    assert roll_call.decode(State, whole.encode()).unacked_s == {"10.0.0.2": 3.0}
    broken = [whole[:length] for length in range(len(whole))]
    broken += ["[]", "7", whole + "}", whole.replace('"chunk": 2', '"chunk": "2"'), roll_call.encode(Opening())]
    for text in broken:
        with pytest.raises(ValueError):
            roll_call.decode(State, text.encode())


# (failed, has a job, has stood still for s), judged with stall_after 2
IDLE, BEGUN, STANDS, HAS_FAILED = (False, False, 0), (False, True, 0.1), (False, True, 1.5), (True, False, 0)
CONCERN = {STALLED: {STANDS, HAS_FAILED}, FAILED: {BEGUN, STANDS, HAS_FAILED}, CUT: {BEGUN, STANDS, HAS_FAILED}}


@pytest.mark.parametrize("why", CONCERN)
def test_which_roll_calls_concern_a_rank_depends_on_their_reason_and_its_own_wait(why):
    assert {wait for wait in (IDLE, BEGUN, STANDS, HAS_FAILED) if concerns(why, *wait, 2)} == CONCERN[why]


# ---- reading answers


class Slow(dist.Store):
    """Takes so long for each request, and has the answers of all of a thousand ranks but 900; of 800 after a while."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.began, self.num_requests = seconds, time.monotonic(), 0

    def check(self, keys: list[str]) -> bool:
        self.num_requests += 1
        time.sleep(self.seconds)
        is_late = time.monotonic() - self.began < 0.4
        return "answer/5/900" not in keys and not (is_late and "answer/5/800" in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [roll_call.encode(state()).encode() for _ in keys]


def read_from(slow: Slow) -> RollCall:
    call = RollCall(5, 1000, Opening())
    store = BoundedStore(slow, timedelta(seconds=60), "a slow store")
    assert collect(store, call, 0.25, 0.75, 0.25, lambda: time.sleep(0.05), lambda: []) is None
    return call


def test_of_a_thousand_ranks_the_missing_one_and_the_late_one_are_found_with_few_requests():
    slow = Slow(0)
    call = read_from(slow)
    assert call.absent == {900: ""} and [*call.late_s] == [800] and len(call.answers) == 999 and not call.unread
    assert slow.num_requests < 200


@pytest.mark.check
def test_what_a_slow_store_does_not_hand_out_is_neither_missing_nor_late():
    call = read_from(Slow(0.2))
    assert not call.absent and not call.late_s and 900 in call.unread
    assert "the store is slow" in conclude(call).text


# ---- connections


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_addresses_are_those_of_ipv4_also_on_a_socket_for_both():
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        ours = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
        theirs, _ = server.accept()
    with ours, theirs:
        found = connections()
        assert "127.0.0.1" in found.own and "127.0.0.1" not in found.unacked_s
