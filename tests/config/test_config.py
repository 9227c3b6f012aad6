"""Config: one object for every front end, defaults that follow the wire, and errors for the keywords of 0.1."""

import dataclasses
import inspect
import pickle

import pytest
import torch
from models import Gradients, synchronise
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import chunks
from fusedcomm.config import Blocks, Checks, Chunks, Config, Fallback, Feedback, Rounding, TwoLevels
from fusedcomm.config.moved import NEW_PLACE
from fusedcomm.native import _C

EVERYTHING = Config(
    "int4",
    "two-shot",
    wires={"*.0": "fp32", "1d": "int8"},
    blocks=Blocks(64, rotate=True),
    rounding=Rounding("stochastic", seed=3),
    feedback=Feedback("bf16"),
    chunks=Chunks(8192, in_flight=3),
    checks=Checks(verify_every=5, fallback=Fallback(0.5, "fp32")),
    hosts=TwoLevels([[0, 1]], "fp16"),
)

# --- one object ------------------------------------------------------------------------------------------------------

SHAPE = (70, 90)
CONFIG = Config("int8", "two-shot", blocks=Blocks(64), rounding=Rounding("stochastic", seed=7), chunks=Chunks(4096))


def gradient_of(rank):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank))


def through(rank, world_size, front_end):
    ddp = DistributedDataParallel(Gradients(SHAPE))
    if front_end == "attach":
        fusedcomm.attach(ddp, CONFIG, quiet=True)
    else:
        ddp.register_comm_hook(fusedcomm.CommState(CONFIG), fusedcomm.comm_hook)
    return synchronise(ddp, [gradient_of(rank)])[0]


def test_every_front_end_takes_the_same_object_and_gives_the_same_bits(ranks):
    simulated = fusedcomm.simulate([gradient_of(rank) for rank in range(2)], CONFIG)
    for front_end in ("attach", "CommState"):
        for seen in ranks.run(through, front_end, world_size=2):
            assert torch.equal(seen, simulated), front_end


def test_a_wire_alone_is_short_for_its_configuration():
    grads = [gradient_of(rank) for rank in range(2)]
    assert torch.equal(fusedcomm.simulate(grads, wire="int4"), fusedcomm.simulate(grads, Config("int4")))
    assert torch.equal(fusedcomm.simulate(grads), fusedcomm.simulate(grads, Config("bf16")))
    assert fusedcomm.CommState(wire="int4").config == fusedcomm.CommState(Config("int4")).config == Config("int4")
    for call in (lambda **both: fusedcomm.simulate(grads, **both), fusedcomm.CommState):
        with pytest.raises(ValueError, match=r"config=Config\(wire='int8'\) and wire='int4'"):
            call(config=Config("int8"), wire="int4")
        with pytest.raises(ValueError, match="config='int8' is not possible: write wire='int8', or fusedcomm.Config"):
            call(config="int8")


def test_a_search_is_for_attach_alone():
    with pytest.raises(ValueError, match="wire='auto' switches between hooks"):
        fusedcomm.CommState(fusedcomm.Auto())
    with pytest.raises(ValueError, match=r"config=Auto\(\) is not possible: use a fusedcomm.Config"):
        fusedcomm.simulate([torch.zeros(3)], fusedcomm.Auto())


def test_a_simulation_with_residuals_of_another_format_is_refused_with_both():
    with pytest.raises(ValueError, match=r"feedback=Feedback\(\) does not match residuals in 'bf16'"):
        config = Config("int8", "two-shot", feedback=Feedback())
        fusedcomm.simulate([torch.zeros(3)] * 2, config, residuals=fusedcomm.Residuals("bf16"))


# --- the object ------------------------------------------------------------------------------------------------------


def test_a_changed_wire_has_its_own_defaults():
    as_int8 = Config("int8", hosts="auto")
    assert (as_int8.block_numel, as_int8.local_wire, as_int8.exempts_1d) == (128, "bf16", True)
    as_int4 = dataclasses.replace(as_int8, wire="int4")
    assert (as_int4.block_numel, as_int4.local_wire, as_int4.exempts_1d) == (32, "bf16", True)
    as_fp32 = dataclasses.replace(as_int8, wire="fp32")
    assert (as_fp32.local_wire, as_fp32.exempts_1d) == ("fp32", False)
    assert dataclasses.replace(as_fp32, wire="int8") == as_int8


def test_a_replaced_field_leaves_the_others_as_they_were_given():
    for field, value in {
        "wire": "int8",
        "sum": "auto",
        "wires": {},
        "blocks": Blocks(),
        "rounding": Rounding(),
        "feedback": None,
        "chunks": Chunks(),
        "checks": Checks(),
        "hosts": "auto",
    }.items():
        changed = dataclasses.replace(EVERYTHING, **{field: value})
        assert getattr(changed, field) == value
        assert dataclasses.replace(changed, **{field: getattr(EVERYTHING, field)}) == EVERYTHING
    assert [f.name for f in dataclasses.fields(Config) if getattr(EVERYTHING, f.name) == f.default] == ["predivide"]


def test_a_replaced_field_is_checked_too():
    with pytest.raises(ValueError, match=r"Blocks\(numel=64\) has no effect with wire='bf16'"):
        dataclasses.replace(Config("int8", blocks=Blocks(64)), wire="bf16")
    with pytest.raises(TypeError, match=r"block= is Config\(blocks=Blocks\(numel=…\)\)"):
        dataclasses.replace(Config("int8"), block=64)


def test_a_configuration_is_shown_as_one_would_write_it():
    for config in (Config(), Config("int8", hosts=None), Config("int8", hosts=TwoLevels()), EVERYTHING):
        assert eval(repr(config), vars(fusedcomm.config)) == config
    assert repr(Config("bf16", hosts="auto")) == "Config(wire='bf16')"
    assert repr(Config("bf16", hosts=None)) == "Config(wire='bf16', hosts=None)"
    checks = Checks(verify_every=5, fallback=Fallback(0.5))
    assert repr(checks) == "Checks(verify_every=5, fallback=Fallback(error=0.5, wire='bf16'))"


def test_a_configuration_cannot_be_changed_from_outside():
    wires = {"head.*": "bf16"}
    config = Config("int8", wires=wires)
    wires["head.*"] = "fp32"
    assert config.wires == {"head.*": "bf16"} and pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.wire = "int4"


def test_two_ways_to_say_the_same_are_agreed_on():
    said = Config("int8", blocks=Blocks(128), hosts=TwoLevels([[3, 2], [0, 1]], "bf16"))
    assert said.record() == Config("int8", hosts=((0, 1), (2, 3))).record()
    assert Config(wires={"a": "int8", "b": "fp8"}).record() != Config(wires={"b": "fp8", "a": "int8"}).record()


def test_biases_and_norms_are_exact_on_wires_with_scales_unless_something_else_is_said_of_them():
    bias = torch.zeros(3)
    for wire in fusedcomm.WIRES:
        default, all_alike = Config(wire), Config(wire, wires={"1d": wire})
        assert default.exempts_1d == _C.has_scales(wire) and not all_alike.exempts_1d
        assert default.wire_number("head.bias", torch.zeros(3, 3)) == 0 == all_alike.wire_number("head.bias", bias)
    first = Config("int8", wires={"head.*": "bf16"})
    assert first.wire_number("head.bias", bias) == _C.EXACT_WIRE
    last = Config("int8", wires={"head.*": "bf16", "1d": "fp32"})
    assert last.wire_number("head.bias", bias) == 1 and last.wire_number("norm.bias", bias) == _C.EXACT_WIRE


def test_chunks_that_are_left_open_are_chosen_beside_the_configuration():
    whole = chunks.resolved(Config("int8", chunks=Chunks(in_flight=3)), world_size=2)
    assert whole.chunks.in_flight == 3 and whole.chunks.nbytes >= 4096
    assert dataclasses.replace(whole, chunks=Chunks(in_flight=3)) == Config("int8", chunks=Chunks(in_flight=3))


# --- old keywords ---------------------------------------------------------------------------------------------------

OF_SEARCH, OF_RANK = {"wires", "tuned"}, {"isa", "codec_threads", "sm_limit", "stall_after"}
OLD_ATTACH = {  # every keyword of 0.1's attach except wire= and quiet=, which are unchanged
    *("sum", "exempt", "block", "rotate", "wire_for", "rounding", "seed", "error_feedback", "predivide"),
    *("chunk_nbytes", "chunks_in_flight", "verify_every", "measure_every", "fallback_error", "fallback_wire"),
    *("hosts", "local_wire"),
    *OF_SEARCH,
    *OF_RANK,
}


def test_every_keyword_of_0_1_has_a_new_place():
    assert NEW_PLACE.keys() == OLD_ATTACH


@pytest.mark.parametrize("keyword", sorted(OLD_ATTACH))
def test_a_keyword_of_0_1_is_an_error_that_names_its_new_place(keyword):
    calls = {
        "attach": lambda **old: fusedcomm.attach(torch.nn.Linear(2, 2), wire="int8", **old),
        "CommState": lambda **old: fusedcomm.CommState(wire="int8", **old),
        "simulate": lambda **old: fusedcomm.simulate([torch.zeros(3)], wire="int8", **old),
    }
    if keyword not in inspect.signature(Config).parameters:
        calls["Config"] = lambda **old: Config("int8", **old)
    for name, call in calls.items():
        with pytest.raises(TypeError) as error:
            call(**{keyword: None})
        assert f"{name}() has other keywords since fusedcomm 0.2: {keyword}= is " in str(error.value)
        assert NEW_PLACE[keyword] in str(error.value)


def test_several_keywords_of_0_1_are_named_together():
    with pytest.raises(TypeError, match=r"exempt= is Config\(wires=.*; chunk_nbytes= is Config\(chunks=Chunks"):
        fusedcomm.CommState(wire="int8", exempt=(), chunk_nbytes=8192)


def test_a_keyword_that_there_never_was_is_python_s_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'wirre'"):
        fusedcomm.CommState(wirre="int8")


@pytest.mark.parametrize("keyword", sorted(OLD_ATTACH))
def test_a_new_place_is_one_that_there_is(keyword):
    """Runs the code that names the new place, with values in place of its dots."""
    code = NEW_PLACE[keyword].split(" instead")[0].split(", which takes")[0]
    values = {
        "numel": 64,
        "in_flight": 2,
        "nbytes": 8192,
        "sum": "'auto'",
        "hosts": "'auto'",
        "groups": "'auto'",
        "wire": "'bf16'",
        "local_wire": "'bf16'",
        "predivide": "'auto'",
        "wires": "('int8',)",
        "tuned": "None",
        "isa": "'auto'",
        "error": 0.5,
    }
    for name, value in values.items():
        code = code.replace(f"({name}=…", f"({name}={value}").replace(f", {name}=…", f", {name}={value}")
    code = code.replace("=…", "=5").removeprefix("local=").replace("Config(", "Config(wire, ")
    names = {**vars(fusedcomm.config), "Auto": fusedcomm.Auto, "pattern": "a", "wire": "int8"}
    for each in code.split("; for exempt=(), "):
        eval(each.replace("Config(wire, wire, ", "Config(wire, "), names)
