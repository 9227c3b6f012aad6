"""The conclusions from the answers to a roll call: slow ranks, missing ranks, and a store that is too slow."""

import re
import subprocess

import pytest
from scripts import compiled


@pytest.fixture(scope="module")
def roll_call_scenes(tmp_path_factory):
    sources = ("fields", "rank_state", "congestion", "roll_call", "roll_call_text")
    folder = tmp_path_factory.mktemp("roll_call")
    return compiled(folder, "tests/native/roll_call_scenes.cpp", *(f"csrc/watch/{source}.cpp" for source in sources))


def printed_by(program, *args):
    return subprocess.run([program, *args], capture_output=True, text=True, check=True).stdout


WAITS = (
    "in step 5 for the all-to-all of chunk 3/4 of bucket 0 (layer.weight; 1 parameters, 1 MiB), handed over 3.0 s ago"
)

CRAWL = "what rank 1 sends piles up: 1220 KB have not left, 0.7 MB/s arrive; elsewhere 29 KB"
STREAMS = "work on the device's streams"


REPORTS = [
    (
        "busy",
        [
            "rank 2 is slow: in step 5 busy with the pack of chunk 3/4 of bucket 0 (layer.weight; 1 parameters, "
            "1 MiB), handed over 3.0 s ago",
            f"ranks 0, 1, 3 wait {WAITS}",
        ],
    ),
    (
        "working",
        [
            "every rank answered and none is behind: some are at work, and the others wait for them",
            f"rank 1 is busy {WAITS.replace('for the all-to-all', 'with the pack')}",
            f"rank 2 is busy {WAITS.replace('for the all-to-all', 'with the reduce')}",
            f"ranks 0, 3 wait {WAITS}",
        ],
    ),
    (
        "all working",
        [
            "every rank answered and none is behind: some are at work, and the others wait for them",
            f"ranks 0, 1, 3 are busy {WAITS.replace('for the all-to-all', 'with the pack')}",
            f"rank 2 is busy {WAITS.replace('for the all-to-all', 'with the reduce')}",
        ],
    ),
    (
        "working crawl",
        [
            "every rank answered and none is behind: they wait for the network, where what rank 0 sends to rank 2 "
            "piles up: 950 KB have not left, 0.3 MB/s arrive; elsewhere 0 KB",
            f"rank 1 is busy {WAITS.replace('for the all-to-all', 'with the pack')}",
            f"ranks 0, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "call",
        [
            "rank 2 is slow: it has not called state_dict(), as every rank has to; nothing under way for 7.2 s, "
            "since step 4",
            "ranks 0, 1, 3 wait in step 5 for the others in state_dict(), called 3.0 s ago",
        ],
    ),
    (
        "call of all",
        [
            "every rank answered and none is behind",
            "ranks 0, 1, 2, 3 wait in step 5 for the others in state_dict(), called 3.0 s ago",
        ],
    ),
    (
        "behind",
        [
            "rank 1 is slow: it has not handed over bucket 0 (layer.weight; 1 parameters, 1 MiB) of step 5; "
            "nothing under way for 7.2 s, since step 4",
            f"ranks 0, 2 wait {WAITS}",
        ],
    ),
    ("failed", ["conclusive", "rank 3 has failed: the reduce failed", f"ranks 0, 1, 2 wait {WAITS}"]),
    (
        "queued",
        [
            "every rank answered and none is behind: they wait for the network",
            f"ranks 0, 2, 3 wait {WAITS}",
            f"rank 1 waits {WAITS.replace('all-to-all of chunk 3/4', 'next stage')}",
        ],
    ),
    (
        "streams",
        [
            "every rank answered and none is behind: they wait for the network",
            f"ranks 0, 2, 3 wait {WAITS}",
            f"rank 1 waits {WAITS.replace('the all-to-all of chunk 3/4', STREAMS)}",
        ],
    ),
    (
        "many",
        [
            "conclusive",
            "rank 20 (which has no watch) is missing: no answer within 2.0 s. It is stopped, was killed, has left, "
            "or is cut off",
            *[
                f"rank {rank} (process 1 on node) is missing: no answer within 2.0 s. It is stopped, was killed, "
                "has left, or is cut off"
                for rank in range(21, 28)
            ],
            "12 more ranks are missing",
            f"ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more wait {WAITS}",
        ],
    ),
    (
        "network",
        ["every rank answered and none is behind: they wait for the network", f"ranks 0, 1, 2, 3 wait {WAITS}"],
    ),
    *[
        (
            scene,
            [
                "every rank answered and none is behind: they wait for the network" + (pile and f", where {pile}"),
                f"ranks 0, 1, 2, 3 wait {WAITS}",
            ],
        )
        for scene, pile in (
            ("crawl", CRAWL),
            (
                "crawl of a host",
                "what ranks 0, 1 send piles up: 1000 KB have not left, 0.0 MB/s arrive; elsewhere 8 KB",
            ),
            (
                "crawl to one",
                "what is sent to rank 3 piles up: 1200 KB have not left, 0.6 MB/s arrive; elsewhere 60 KB",
            ),
            (
                "crawl to a host",
                "what is sent to ranks 2, 3 piles up: 800 KB have not left, 0.0 MB/s arrive; elsewhere 0 KB",
            ),
            (
                "crawl between two",
                "what rank 1 sends to rank 0 piles up: 900 KB have not left, 12.0 MB/s arrive; elsewhere 50 KB",
            ),
            (
                "crawl of one to many",
                "what rank 1 sends piles up: 100 KB have not left, 0.0 MB/s arrive; elsewhere 5 KB",
            ),
            # Connections that do not go from one host of the job to another name no link.
            *[(scene, "") for scene in ("everywhere", "little", "one host", "upload")],
        )
    ],
    (
        "late crawl",
        [
            "rank 1 is slow: it took 1.8 s to answer, while 1220 KB of what it sends had not left",
            f"they wait for the network, where {CRAWL}",
            f"ranks 0, 1, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "passing",
        [
            "every rank answered and none is behind: some are at work, and the others wait for them",
            f"ranks 0, 1, 3 wait {WAITS}",
            f"rank 2 is busy {WAITS.replace('for the all-to-all', 'with the pack')}",
        ],
    ),
    (
        # The reason is the rank that has not handed over, not the network.
        "unsent and behind",
        [
            "rank 1 is slow: it has not handed over bucket 0 (layer.weight; 1 parameters, 1 MiB) of step 5; "
            "nothing under way for 7.2 s, since step 4",
            f"ranks 0, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "late",
        [
            "rank 2 is slow: it took 1.8 s to answer, as if its process had been stopped",
            f"ranks 0, 1, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "cut",
        [
            "the link between rank 1 and rank 2 carries nothing: what rank 1 sent has not been acknowledged for 4.2 s, "
            "and what rank 2 sent has not been acknowledged for 4.0 s",
            "every rank answered and none is behind: they wait for the network",
            f"ranks 0, 1, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "cut one way",
        [
            "the link between rank 0 and rank 3 carries nothing: what rank 3 sent has not been acknowledged for 6.0 s",
            "every rank answered and none is behind: they wait for the network",
            f"rank 1 is busy {WAITS.replace('for the all-to-all', 'with the pack')}",
            f"ranks 0, 2, 3 wait {WAITS}",
        ],
    ),
    (
        "host down",
        [
            "conclusive",
            "rank 2 (process 1 on node) is missing: no answer within 2.0 s, and its host has not acknowledged for "
            "6.1 s what was sent to it. That host is down or cut off",
            f"ranks 0, 1, 3 wait {WAITS}",
        ],
    ),
    (
        # Not conclusive: the answer may still come.
        "full link",
        [
            "rank 2 (process 1 on node) is slow: no answer within 2.0 s, but bytes from its host still arrive. Its "
            "link may be full, so that its answer waits behind them",
            f"ranks 0, 1, 3 wait {WAITS}",
        ],
    ),
    *[
        (
            scene,
            [
                "conclusive",
                "rank 2 (process 1 on node) is missing: no answer within 2.0 s. It is stopped, was killed, has left, "
                "or is cut off",
                f"ranks 0, 1, 3 wait {WAITS}",
            ],
        )
        for scene in ("full link, late", "neighbour heard")
    ],
    ("over", ["every rank answered, and none waits any more"]),
    (
        "pairs apart",
        [
            "every rank answered and none is behind: they wait for the network",
            *[f"ranks {2 * i}, {2 * i + 1} wait {WAITS.replace('3/4', f'{i + 1}/20')}" for i in range(8)],
            "24 more ranks are waiting elsewhere",
        ],
    ),
    (
        "apart",
        [
            "every rank answered and none is behind: they wait for the network",
            *[f"rank {i} waits {WAITS.replace('3/4', f'{i + 1}/9')}" for i in range(8)],
            "1 more rank is waiting elsewhere",
        ],
    ),
    (
        "unread",
        [
            "2 answers not read in time, of ranks 1, 3: the store is slow",
            f"ranks 0, 2 wait {WAITS}",
        ],
    ),
    (
        # Not conclusive: another roll call may find more.
        "unread and missing",
        [
            "1 answer not read in time, of rank 1: the store is slow",
            "rank 2 (process 1 on node) is missing: no answer within 2.0 s. It is stopped, was killed, has left, "
            "or is cut off",
            f"ranks 0, 3 wait {WAITS}",
        ],
    ),
]


@pytest.mark.parametrize(("scene", "lines"), REPORTS)
def test_the_report_says_what_the_answers_say(roll_call_scenes, scene, lines):
    printed = printed_by(roll_call_scenes, scene).splitlines()
    world_size = {"many": 40, "pairs apart": 40, "apart": 9}.get(scene, 4)
    head = f"fusedcomm: roll call 5 of {world_size} ranks, opened by rank 0, where nothing has moved"
    head += " for 0.0 s"
    printed.remove(head)
    assert sorted(line.strip() for line in printed) == sorted(lines)


def read_slowly(roll_call_scenes, seconds_of_an_answer):
    return printed_by(roll_call_scenes, "slowly", str(seconds_of_an_answer))


@pytest.mark.parametrize("seconds, late", [(1e-4, True), (2.5e-3, False)])
def test_of_a_thousand_ranks_the_missing_one_is_named(roll_call_scenes, seconds, late):
    report = read_slowly(roll_call_scenes, seconds)
    assert report.startswith("conclusive\n") and "rank 900 (which has no watch) is missing" in report
    assert report.count("is missing") == 1 and "not read" not in report
    # If the store is slow, a rank whose answer is read late does not count as slow.
    assert report.count("is slow") == late and ("rank 800 is slow" in report) == late


def test_what_a_slow_store_does_not_hand_out_is_not_missing(roll_call_scenes):
    report = read_slowly(roll_call_scenes, 1e-2)
    unread = re.search(r"(\d+) answers not read in time, of ranks (\d+), ", report)
    assert 500 < int(unread[1]) < 650 and int(unread[1]) + int(unread[2]) == 1000
    assert "missing" not in report and "is slow:" not in report and "conclusive" not in report


# ---- encoding


def test_every_field_comes_back_as_it_was(roll_call_scenes):
    printed_by(roll_call_scenes, "round trip")


def test_what_was_cut_off_or_garbled_is_an_error_that_says_so(roll_call_scenes):
    printed_by(roll_call_scenes, "unreadable")


def test_a_rank_whose_answer_cannot_be_read_is_neither_missing_nor_slow(roll_call_scenes):
    head, *lines = printed_by(roll_call_scenes, "garbled").splitlines()  # the first line is not "conclusive"
    assert head.startswith("fusedcomm: roll call 5 of 4 ranks")
    cut_off = r"it is cut off or garbled: its checksum is \"\w{16}\", but its \d+ bytes of fields have \"\w{16}\""
    assert re.fullmatch(f"  rank 1 answered, but its answer cannot be read: {cut_off}", lines[0])
    other_kind = r"it does not begin with \"state 1 \" but is \"report 1 .*…\""
    assert re.fullmatch(f"  rank 2 answered, but its answer cannot be read: {other_kind}", lines[1])
    assert lines[2:] == [f"  ranks 0, 3 wait {WAITS}"]


# ---- text is for people


@pytest.mark.parametrize("scene", [scene for scene, _ in REPORTS])
def test_the_words_of_labels_and_failures_change_nothing_that_is_concluded(roll_call_scenes, scene):
    printed_by(roll_call_scenes, "words", scene)


def test_which_roll_calls_concern_a_rank_depends_on_no_words(roll_call_scenes):
    printed_by(roll_call_scenes, "concern")
