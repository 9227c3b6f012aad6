"""The conclusions from the answers to a roll call: slow ranks, missing ranks, and a store that is too slow."""

import re
import subprocess
from pathlib import Path

import pytest
from scripts import compiled

pytestmark = pytest.mark.check


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
WORDS = {
    "WAITS": WAITS,
    "PACKS": WAITS.replace("for the all-to-all", "with the pack"),
    "REDUCES": WAITS.replace("for the all-to-all", "with the reduce"),
    "NETWORK": "every rank answered and none is behind: they wait for the network",
    "AT_WORK": "every rank answered and none is behind: some are at work, and the others wait for them",
    "GONE": "no answer within 2.0 s. It is stopped, was killed, has left, or is cut off",
    "BUCKET": "bucket 0 (layer.weight; 1 parameters, 1 MiB)",
    "SINCE": "nothing under way for 7.2 s, since step 4",
}


def reports() -> list[tuple[str, list[str]]]:
    """The lines of each scene's report: roll_call_reports.txt has a line [scene] before them. "conclusive" stands for
    the program's line that no other roll call will find more."""
    text = Path(__file__).with_name("roll_call_reports.txt").read_text().format(**WORDS)
    scenes = (scene.splitlines() for scene in re.split(r"^\[", text, flags=re.MULTILINE)[1:])
    return [(head.removesuffix("]"), lines) for head, *lines in scenes]


REPORTS = reports()


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
