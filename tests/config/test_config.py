"""Config: one object for every front end, and defaults that follow the wire."""

import dataclasses
import pickle

import pytest
import torch

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import Chunks, Config, Feedback, TwoLevels
from fusedcomm.integrations.attachment import Attachment
from fusedcomm.native import _C

EVERYTHING = Config(
    "int4",
    "two-shot",
    wires={"*.0": "fp32", "1d": "int8"},
    feedback=Feedback(),
    chunks=Chunks(8192, in_flight=3),
    compare_every=None,
    compare="raise",
    hosts=TwoLevels([[0, 1]], "fp16"),
)

# --- one object ------------------------------------------------------------------------------------------------------


def test_a_wire_alone_is_short_for_its_configuration():
    grads = [torch.randn(5000, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    assert torch.equal(fusedcomm.simulate(grads, "int4"), fusedcomm.simulate(grads, Config("int4")))
    assert torch.equal(fusedcomm.simulate(grads), fusedcomm.simulate(grads, Config("bf16")))
    assert fusedcomm.CommState("int4").config == fusedcomm.CommState(Config("int4")).config == Config("int4")


@pytest.mark.parametrize("wrong", [8, ["bf16"], {"wire": "int8"}, fusedcomm.LocalOptions()], ids=repr)
def test_anything_else_is_refused_with_what_is_possible(wrong):
    model, grads = torch.nn.Linear(2, 2), [torch.zeros(3)]
    for call in (
        lambda: fusedcomm.CommState(wrong),
        lambda: fusedcomm.simulate(grads, wrong),
        lambda: fusedcomm.GradReducer(model, wrong),
        lambda: fusedcomm.attach(model, wrong),
        lambda: Attachment(wrong),
    ):
        with pytest.raises(TypeError) as error:
            call()
        for words in (f"config={wrong!r} is not", "a wire's name ('fp32', 'bf16',", "fusedcomm.Config(…)"):
            assert words in str(error.value)


# --- the object ------------------------------------------------------------------------------------------------------


def test_a_changed_wire_has_its_own_defaults():
    as_int8 = Config("int8", hosts="auto")
    assert (as_int8.formats, as_int8.local_wire, as_int8.wire_number_1d) == ([("int8", 128)], "bf16", _C.EXACT_WIRE)
    as_int4 = dataclasses.replace(as_int8, wire="int4")
    assert (as_int4.formats, as_int4.local_wire, as_int4.wire_number_1d) == ([("int4", 32)], "bf16", _C.EXACT_WIRE)
    as_fp32 = dataclasses.replace(as_int8, wire="fp32")
    assert (as_fp32.local_wire, as_fp32.wire_number_1d) == ("fp32", 0)
    assert dataclasses.replace(as_fp32, wire="int8") == as_int8


def test_a_replaced_field_leaves_the_others_as_they_were_given():
    for field, value in {
        "wire": "int8",
        "sum": "auto",
        "wires": {},
        "feedback": None,
        "chunks": Chunks(),
        "compare_every": 1000,
        "compare": "warn",
        "hosts": "auto",
    }.items():
        changed = dataclasses.replace(EVERYTHING, **{field: value})
        assert getattr(changed, field) == value
        assert dataclasses.replace(changed, **{field: getattr(EVERYTHING, field)}) == EVERYTHING
    assert [f.name for f in dataclasses.fields(Config) if getattr(EVERYTHING, f.name) == f.default] == [
        "weighted",
        "params",
        "params_kept",
    ]


def test_a_configuration_is_shown_as_one_would_write_it():
    for config in (Config(), Config("int8", hosts=None), Config("int8", hosts=TwoLevels()), EVERYTHING):
        assert eval(repr(config), vars(fusedcomm.config)) == config
    assert repr(Config("bf16", hosts="auto")) == "Config(wire='bf16')"
    assert repr(Config("bf16", hosts=None)) == "Config(wire='bf16', hosts=None)"


def test_a_configuration_cannot_be_changed_from_outside():
    wires = {"head.*": "bf16"}
    config = Config("int8", wires=wires)
    wires["head.*"] = "fp32"
    assert config.wires == {"head.*": "bf16"} and pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.wire = "int4"


def test_two_ways_to_say_the_same_are_agreed_on():
    said = Config("int8", hosts=TwoLevels([[3, 2], [0, 1]], "bf16"))
    assert said.record() == Config("int8", hosts=((0, 1), (2, 3))).record()
    assert Config(wires={"a": "int8", "b": "fp8"}).record() != Config(wires={"b": "fp8", "a": "int8"}).record()


def test_biases_and_norms_are_exact_on_wires_with_scales_unless_something_else_is_said_of_them():
    bias = torch.zeros(3)
    for wire in fusedcomm.WIRES:
        default, all_alike = Config(wire), Config(wire, wires={"1d": wire})
        assert default.wire_number_1d == (_C.EXACT_WIRE if _C.has_scales(wire) else 0)
        assert default.wire_number("head.bias", torch.zeros(3, 3)) == 0 == all_alike.wire_number("head.bias", bias)
    first = Config("int8", wires={"head.*": "bf16"})
    assert first.wire_number("head.bias", bias) == _C.EXACT_WIRE
    last = Config("int8", wires={"head.*": "bf16", "1d": "fp32"})
    assert last.wire_number("head.bias", bias) == 1 and last.wire_number("norm.bias", bias) == _C.EXACT_WIRE


def test_chunks_that_are_left_open_are_chosen_beside_the_configuration():
    whole = chunks.resolved(Config("int8", chunks=Chunks(in_flight=3)), world_size=2)
    assert whole.chunks.in_flight == 3 and whole.chunks.nbytes >= 4096
    assert dataclasses.replace(whole, chunks=Chunks(in_flight=3)) == Config("int8", chunks=Chunks(in_flight=3))
