"""The measuring loop of config="auto" and of the probe, what it keeps, and the report."""

from fusedcomm.autotune.turns import Turns, preferred
from fusedcomm.session.plan import Tuning


def taken(turns, step_ms):
    """Takes all steps. Returns the candidate of each one. step_ms(candidate, turn): the time of a step."""
    steps = []
    while not turns.finished:
        candidate = turns.candidate
        steps += [candidate] * turns.num_steps
        turns.record([step_ms(candidate, len(turns.seen[candidate]))] * turns.timed)
    return steps


def test_candidates_take_turns_that_begin_with_another_one_each_time():
    turns = Turns("abc", 3, timed=2, untimed=1, untimed_first=4)
    assert taken(turns, lambda *_: 1.0) == list("aaaaaabbbbbbcccccc" + "bbbcccaaa" + "cccaaabbb")
    assert {candidate: len(of) for candidate, of in turns.seen.items()} == {"a": 3, "b": 3, "c": 3}


def test_one_disturbed_turn_does_not_decide():
    disturbed = {("a", 0): 300.0, ("b", 1): 5.0}
    turns = Turns(["a", "b"], 3, timed=2)
    taken(turns, lambda *turn: disturbed.get(turn, 100.0))
    assert turns.medians() == {"a": 100.0, "b": 100.0} and preferred(turns.medians()) == "a"


def test_a_later_one_has_to_be_faster_by_the_margin():
    assert preferred({"off": 100, "bf16": 60, "int8": 40}) == "int8"
    assert preferred({"off": 100, "bf16": 60, "int8": 59}) == "bf16"
    assert preferred({"off": 100, "bf16": 98, "int8": 99}) == "off"
    assert preferred({"off": 100, "bf16": 120, "int8": 96}) == "int8"
    assert preferred({"off": float("inf"), "bf16": float("inf")}) == "off"


def test_a_report_has_the_times_that_decided():
    tuning = Tuning(None, ("off", "bf16"), {}, 3, 24)
    assert str(tuning) == "fusedcomm: config='auto' tries off, bf16, step 3 of 24: no times"
    tuning = Tuning(None, ("off", "bf16"), {"off": 102.04}, 7, 24)
    assert str(tuning) == "fusedcomm: config='auto' tries off, bf16, step 7 of 24: off 102 ms"
    tuning = Tuning("bf16", ("off", "bf16"), {"off": 102.0, "bf16": 62.0}, 24, 24)
    assert str(tuning) == "fusedcomm: bf16 chosen by config='auto' in 24 steps: off 102 ms, bf16 62 ms"
    assert str(Tuning("off", ("off",), {}, 0, 0)) == "fusedcomm: off chosen by config='auto' at once"
