"""The probe's choices, and which one it recommends for the steps that it saw."""

import pytest

from fusedcomm.config import Config
from fusedcomm.tools.probe.choices import (
    FSDP2,
    OFF,
    Candidate,
    Seen,
    choices,
    code_of,
    config_of,
    finalists,
    recommend,
    way_of,
)

USUAL = Candidate("off", bucket_mib=25.0)


def of(name: str, cap: float = 25.0) -> Candidate:
    wire, _, sum = name.partition(" ")
    return Candidate(wire, sum or "auto", bucket_mib=cap)


def seen(**steps_s: float | list[float]) -> dict[Candidate, Seen]:
    """By choice: what its steps showed. A number stands for four such steps; off_5: in buckets of 5 MiB."""
    found = {}
    for name, steps in steps_s.items():
        wire, _, cap = name.partition("_")
        found[of(wire, float(cap or 25))] = Seen(steps if isinstance(steps, list) else [steps] * 4, [1.0], 8, 8)
    return found


ACCEPTED = ("bf16", "int8")


def test_the_fastest_is_recommended_with_its_code_and_its_gain():
    found = recommend(seen(off=0.6, bf16=0.4, int8=0.3, int4=0.1), ACCEPTED, 0.2)
    assert (found.choice, found.baseline, found.gain) == (of("int8"), USUAL, 0.5)
    assert found.reason == (
        "of 600.0 ms with DDP's own all-reduce, 400.0 ms are spent waiting for gradients; 300.0 ms are saved"
    )
    assert code_of(found.choice, by_host=False).startswith("ddp = DistributedDataParallel(model); comm = fusedcomm.")
    assert recommend(seen(off=0.6, int4=0.1), ("int4",), 0.2).choice == of("int4")


def test_of_choices_that_are_as_fast_the_more_exact_and_the_plainer_is_recommended():
    assert recommend(seen(off=0.6, bf16=0.305, int8=0.3), ACCEPTED, 0.2).choice == of("bf16")
    assert recommend(seen(off=0.6, bf16_5=0.3, bf16=0.302), ACCEPTED, 0.2).choice == of("bf16")
    assert recommend(seen(off=0.6, bf16_5=0.25, bf16=0.3), ACCEPTED, 0.2).choice == of("bf16", 5)


@pytest.mark.parametrize(
    ("off_s", "int8_s", "alone_s", "reason"),
    [
        ([1.0, 1.1, 1.0, 1.1], [0.7, 0.8, 0.7, 0.8], 0.2, None),
        ([1.0, 1.1, 1.0, 1.1], [1.2, 1.3, 1.2, 1.3], 0.2, "steps are longer: int8 1250.0 ms, off 1050.0 ms"),
        ([1.0, 1.01, 1.0, 1.01], [0.99, 1.0, 0.99, 1.0], 0.2, "too little is saved: int8 995.0 ms, off 1005.0 ms"),
        ([1.0, 1.01, 1.0, 1.01], [0.99, 1.0, 0.99, 1.0], 1.0, "communication is hidden behind the backward pass: "),
        # A quarter of the steps with int8 are as long as most of the others.
        (
            [1.0, 1.1, 1.0, 1.1],
            [0.7, 0.8, 1.2, 0.7],
            0.2,
            "the steps do not show that anything is saved, because they overlap: int8 750.0 ms, off 1050.0 ms",
        ),
    ],
    ids=["faster", "slower", "hardly faster", "hidden", "noise"],
)
def test_what_steps_do_not_show_to_be_faster_is_not_recommended(off_s, int8_s, alone_s, reason):
    found = recommend(seen(off=off_s, int8=int8_s), ("int8",), alone_s)
    assert found.choice == (of("int8") if reason is None else USUAL) and found.leave_off == (reason is not None)
    assert reason is None or found.reason.startswith(reason)


def test_left_off_where_nothing_is_accepted():
    found = recommend(seen(off=0.6, int4=0.1), (), 0.2)
    assert found.leave_off and found.reason == "no fusedcomm wire was accepted"


@pytest.mark.parametrize(("others_s", "cap"), [([0.7, 0.8, 0.7, 0.8], 5), ([0.7, 0.8, 1.2, 0.7], 25)])
def test_other_buckets_of_ddp_have_to_be_shown_to_be_faster_too(others_s, cap):
    found = recommend(seen(off=[1.0, 1.1, 1.0, 1.1], off_5=others_s), (), 0.2)
    assert found.choice == of("off", cap) and found.baseline == USUAL
    assert cap == 25 or code_of(found.choice, False).endswith("(model, bucket_cap_mb=5)")


def test_finalists_are_ddp_and_what_came_near_to_the_best():
    found = seen(off=0.6, bf16=0.33, int8=0.3, fp8=0.34, int4=0.1, off_5=0.5, int8_5=0.32)
    assert finalists(found, ACCEPTED) == [USUAL, of("int8"), of("int8", 5), of("bf16"), of("off", 5)]
    assert finalists(seen(off=0.6, int4=0.1), ACCEPTED) == [USUAL]


def test_accepted_wires_come_first_with_their_usual_sum():
    found = choices(("int4", "bf16", "fp32"), ("bf16",), by_host=False, cap_mib=5.0)
    assert [way_of(choice) for choice in found] == ["off", "bf16", "bf16 direct", "int4", "fp32"]
    assert {choice.bucket_mib for choice in found} == {5.0}
    found = choices(("int8", "fp32"), ("int8",), by_host=True, cap_mib=25.0)
    assert [way_of(choice) for choice in found] == ["off", "int8 by host", "int8", "fp32"]


def test_fsdp2_has_neither_buckets_nor_direct_sums_and_fp32_on_two_levels():
    found = choices(("int8", "bf16", "fp32"), ("int8", "bf16", "fp32"), by_host=True, cap_mib=None, front_end=FSDP2)
    assert list(map(str, found)) == ["off", "int8 by host", "bf16 by host", "fp32 by host", "int8", "bf16"]
    codes = {str(choice): code_of(choice, True, FSDP2).partition("; comm = ")[2] for choice in found}
    assert codes["off"] == "" and codes["fp32 by host"] == 'fusedcomm.attach(model, "fp32")'
    assert codes["int8"] == 'fusedcomm.attach(model, fusedcomm.Config(wire="int8", hosts=None))'


def test_where_parameters_in_codes_are_no_faster_exact_ones_are_recommended():
    steps = {Candidate("off"): 0.6, Candidate("int8"): 0.302, Candidate("int8", params="int8"): 0.3}
    for slower, params in ((0.302, "fp32"), (0.4, "int8")):
        steps[Candidate("int8")] = slower
        taken = {choice: Seen([step_s] * 4, [1.0], 8, 8) for choice, step_s in steps.items()}
        found = recommend(taken, ("int8",), 0.2, FSDP2)
        assert found.choice == Candidate("int8", params=params) and found.baseline == OFF
    assert found.reason.startswith(
        "of 600.0 ms with torch's own collectives, 400.0 ms are spent waiting for gradients "
    )


def test_each_choice_has_its_configuration_and_says_one_level_where_there_could_be_two():
    flat, levels = choices(("int8",), ("int8",), by_host=True, cap_mib=25.0)[:0:-1]
    assert config_of(OFF) is None
    assert (config_of(levels), config_of(flat)) == (Config("int8"), Config("int8", hosts=None))
    assert "hosts=None" in code_of(flat, by_host=True)
    assert code_of(flat, by_host=False) == code_of(levels, by_host=True) == code_of(levels, by_host=False)
