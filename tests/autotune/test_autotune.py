"""The search of config="auto" on given step times, and the files that Tuning.save writes."""

import dataclasses

import pytest

from fusedcomm.autotune import search as autotune
from fusedcomm.autotune.auto import Auto
from fusedcomm.autotune.search import OFF, Candidate, Search, Trial, Tuning, preferred
from fusedcomm.autotune.space import Space
from fusedcomm.config import Config

FP32, BF16, INT8, INT4 = (Candidate(wire) for wire in ("fp32", "bf16", "int8", "int4"))

# --- what it may choose ---------------------------------------------------------------------------------------------


def test_it_says_which_wires_it_may_choose_and_how_to_let_it_choose_others():
    space = Space(Auto())
    tuning = Tuning(False, None, (), 0, 90, 2, "cpu", "digest", wires=space.wires, more_wires=space.more_wires)
    line = (
        "it may choose off, fp32, bf16; fp16, int8, fp8, int4 only if named: "
        "fusedcomm.Auto(wires=('fp32', 'bf16', 'int8'))"
    )
    assert tuning.wires_line == line and f"\n  {line}" in str(tuning)
    named = Auto(wires=("fp32", "bf16", "int8"))  # as the line says
    assert Space(named).wires == ("fp32", "bf16", "int8")
    every = dataclasses.replace(tuning, more_wires=())
    assert every.wires_line == "it may choose off, fp32, bf16"
    assert dataclasses.replace(tuning, wires=(), more_wires=()).wires_line == ""
    assert Space(Auto(base=Config(sum="direct"))).more_wires == ("fp16",)


# --- the search, on given times -------------------------------------------------------------------------------------


def nothing(best):
    return []


def search(step_ms, wires=(BF16, INT8, INT4), sums=nothing, chunks=nothing):
    """Runs a search to its end and returns it, with `num_steps`, the steps that it took.

    `step_ms(candidate, trial)` returns the step time in ms of the trial with that number.
    """
    found = Search(wires, sums, chunks)
    found.num_steps = 0
    while not found.finished:
        found.num_steps += found.trial_steps
        found.record(step_ms(found.candidate, len(found.trials)))
    return found


def by_candidate(**ms):
    return lambda candidate, trial: ms[str(candidate).replace(" ", "_")]


def test_the_fastest_is_kept():
    found = search(by_candidate(off=100, bf16=60, int8=40, int4=30))
    assert found.candidate == INT4
    assert [trial.candidate for trial in found.trials] == [OFF, BF16, INT8, INT4, OFF, INT4]


def test_the_more_exact_is_kept_unless_it_is_slower_by_more_than_the_margin():
    assert search(by_candidate(off=100, bf16=60, int8=59, int4=58.5)).candidate == BF16
    assert search(by_candidate(off=100, bf16=60, int8=57, int4=57)).candidate == INT8
    assert search(by_candidate(off=100, bf16=98, int8=98, int4=99)).candidate == OFF
    assert search(by_candidate(off=100, bf16=99, int8=96, int4=95)).candidate == INT8


def test_off_is_kept_unless_something_is_faster_by_more_than_the_margin():
    """This holds for exact candidates, too: only during the search does off divide in a separate pass."""
    assert search(by_candidate(off=100, fp32=98, bf16=98), (FP32, BF16)).candidate == OFF
    assert search(by_candidate(off=100, fp32=101, bf16=99), (FP32, BF16)).candidate == OFF
    assert search(by_candidate(off=100, fp32=96, bf16=95), (FP32, BF16)).candidate == FP32
    assert preferred({OFF: 100, FP32: 97.5, BF16: 97.5}) == OFF
    assert preferred({OFF: float("inf"), BF16: float("inf")}) == OFF


def test_of_ours_that_are_exact_the_fastest_is_kept():
    in_small_chunks = dataclasses.replace(FP32, chunk_nbytes=4096)
    assert preferred({OFF: 100, FP32: 96, in_small_chunks: 95, BF16: 94}) == in_small_chunks
    # It is also the finalist that another wire has to beat.
    found = search(by_candidate(off=100, fp32=80, bf16=70), (FP32, BF16))
    assert [str(trial.candidate) for trial in found.trials] == ["off", "fp32", "bf16", *["fp32", "bf16"] * 2]
    assert found.candidate == BF16


def test_what_is_much_slower_than_off_is_not_looked_at_again():
    found = search(by_candidate(off=100, bf16=120, int8=111, int4=150))
    assert found.candidate == OFF and len(found.trials) == 4


def test_a_lucky_or_an_unlucky_first_look_is_not_trusted():
    off_was_disturbed = {0: 300.0}
    found = search(lambda candidate, trial: off_was_disturbed.get(trial, 100.0), wires=(BF16,))
    assert found.candidate == OFF and len(found.trials) == 2 + 2 * autotune.MAX_ROUNDS
    bf16_was_lucky = {1: 50.0, 3: 100.0, 5: 104.0}
    assert search(lambda candidate, trial: bf16_was_lucky.get(trial, 100.0), wires=(BF16,)).candidate == OFF


def test_a_wire_that_was_unlucky_at_first_is_looked_at_again():
    def with_luck(times, **first):
        return lambda candidate, trial: first.pop(candidate.wire, times[candidate.wire])

    times = {"off": 100, "bf16": 90, "int8": 70, "int4": 95}
    found = search(with_luck(times, int8=90))
    assert [trial.candidate for trial in found.trials[4:]] == [OFF, BF16, INT8] * 2
    assert found.candidate == INT8
    # Only the fastest other wire that comes NEAR to the best is tried again. With 100 ms int8 does not.
    assert search(with_luck(times, int8=100)).candidate == BF16
    # One lucky trial puts int8 ahead of bf16, which is more exact. Tried again, int8 is not faster.
    found = search(with_luck({"off": 100, "bf16": 80, "int8": 81, "int4": 95}, int8=76))
    assert found.candidate == BF16 and [trial.candidate for trial in found.trials[4:]] == [OFF, BF16, INT8] * 2
    # A finalist that is FAR behind the best is not tried a third time.
    found = search(with_luck({"off": 300, "bf16": 90, "int8": 86, "int4": 200}))
    assert [trial.candidate for trial in found.trials[4:]] == [OFF, BF16, INT8, BF16, INT8]
    assert found.candidate == INT8


def test_sums_and_chunks_of_the_best_wire_are_tried_one_after_the_other():
    direct = dataclasses.replace(BF16, sum="direct")

    def sums(best):
        assert best == BF16
        return [direct]

    def chunks(best):
        assert best == direct
        return [dataclasses.replace(best, chunk_nbytes=nbytes) for nbytes in (4096, 65536)]

    times = {"off": 100, "bf16": 70, "bf16 direct": 60, "bf16 direct in chunks of 4 KiB": 80}
    found = search(lambda candidate, trial: times.get(str(candidate), 50), (BF16,), sums, chunks)
    assert found.candidate == Candidate("bf16", "direct", 65536)


def test_a_report_has_the_times_that_decided():
    looks = [(OFF, 300.0), (BF16, 80.0), (INT8, 70.0), (OFF, 100.0), (INT8, 60.0), (OFF, 104.0), (INT8, 64.0)]
    tuning = Tuning(True, INT8, tuple(Trial(*look) for look in looks), 52, 80, 2, "cpu", "digest")
    assert tuning.step_ms == {OFF: 102.0, BF16: 80.0, INT8: 62.0}
    assert str(tuning) == (
        "fusedcomm: int8 chosen by config='auto' from 3 candidates in 52 steps: off 300 ms, bf16 80 ms, int8 70 ms; "
        "once more: off 102 ms, int8 62 ms"
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '{"fusedcomm tuning": 99}', '{"fusedcomm tuning": 2}'])
def test_a_file_that_is_something_else_is_named(tmp_path, text):
    path = tmp_path / "tuned.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="tuned.json' is not what Tuning.save"):
        Tuning.load(path)
