"""What a configuration refuses when it is made: values out of range, and pairs of values that exclude each other. An
error names both values of a pair."""

import pytest

import fusedcomm
from fusedcomm.config import Blocks, Chunks, Config, Feedback, LocalOptions, TwoLevels


def words_of(value):
    """A value's test id. It must be the same in every process, and a lambda's text has an address in memory."""
    return str(value) if isinstance(value, list) else "make"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Config("fp7"), ["wire='fp7'", "'fp32', 'bf16', 'fp16', 'int8'"]),
        (lambda: Config(None), ["wire=None"]),
        (lambda: Config("fp8_e5m2"), ["wire='fp8_e5m2'", "'int8', 'fp8', 'int4'"]),
        (lambda: Config("auto"), ["wire='auto'", "and fusedcomm.GradReducer", "fusedcomm.Auto(…)", "'fp32', 'bf16'"]),
        (lambda: Config(sum="ring"), ["sum='ring'", "'two-shot'"]),
        (lambda: Config("fp16", predivide=-1.0), ["predivide=-1.0", "positive"]),
        (lambda: Config("fp16", predivide=float("inf")), ["predivide=inf"]),
        (lambda: Config("fp16", predivide=10**400), ["predivide=1000", "to 1e38"]),
        (lambda: Config("fp16", predivide=1e-300), ["predivide=1e-300", "from 1e-38"]),
        (lambda: Config("fp16", predivide="half"), ["predivide='half'", "'auto'"]),
        (lambda: Config(wires="bf16"), ["wires='bf16'", "dict"]),
        (lambda: Config(wires={"a": "fp7"}), ["wires['a']='fp7'", "'fp8'"]),
        (lambda: Config(wires={"": "fp8"}), ["wires['']", "pattern"]),
        (lambda: Config(wires={5: "fp8"}), ["wires[5]", "pattern"]),
        (lambda: Config(blocks=64), ["blocks=64", "a fusedcomm.Blocks(…)"]),
        (lambda: Config(feedback=True), ["feedback=True", "a fusedcomm.Feedback(…)"]),
        (lambda: Config(chunks=4096), ["chunks=4096", "a fusedcomm.Chunks(…)"]),
        (lambda: Config(compare_every=0), ["compare_every=0", "1 or more, or None for never"]),
        (lambda: Config(compare_every=2.5), ["compare_every=2.5", "whole number"]),
        (lambda: Config(compare="stop"), ["compare='stop'", "'raise'"]),
        (lambda: Config(measure_every=-3), ["measure_every=-3", "0 for never"]),
        (lambda: Config(measure_every=1.5), ["measure_every=1.5", "whole number"]),
        (lambda: Config(measure_every=2**70), [f"measure_every={2**70}", "number of steps"]),
        (lambda: Config(hosts="by rack"), ["hosts='by rack'", "'auto'"]),
        (lambda: Config(hosts=[[0, "1"]]), ["hosts=[[0, '1']] is not possible", "use 'auto'"]),
        (lambda: Config(hosts=[]), ["hosts=[]", "it has no ranks"]),
        (lambda: Config(hosts=0), ["hosts=0"]),
        (lambda: Config(hosts=[[0, 1], [1, 2]]), ["rank(s) [1] are on two hosts"]),
        (lambda: Config(hosts=[[0, 1], [2]]), ["hosts[0] has 2 ranks, hosts[1] 1"]),
        (lambda: TwoLevels("auto", "int8"), ["TwoLevels(local_wire)='int8' is not known", "'bf16'"]),
        (lambda: Blocks(100), ["Blocks(numel)=100", "power of two", "32", "4096"]),
        (lambda: Blocks(16), ["Blocks(numel)=16"]),
        (lambda: Blocks(8192), ["Blocks(numel)=8192"]),
        (lambda: Blocks("128"), ["Blocks(numel)='128'", "power of two"]),
        (lambda: Blocks(rotate=1), ["Blocks(rotate)=1", "True or False"]),
        (lambda: Feedback("fp8"), ["Feedback(format)='fp8'", "'fp32', 'bf16'"]),
        (lambda: Feedback(decay=0), ["Feedback(decay)=0", "above 0 and at most 1"]),
        (lambda: Feedback(decay=1.5), ["Feedback(decay)=1.5", "above 0 and at most 1"]),
        (lambda: Feedback("int8"), ["Feedback(format)='int8'", "'fp32', 'bf16'"]),
        (lambda: Chunks(100), ["Chunks(nbytes)=100", "4096"]),
        (lambda: Chunks(2**63), [f"Chunks(nbytes)={2**63}", "whole number of bytes"]),
        (lambda: Chunks(2**62), [f"Chunks(nbytes)={2**62}", "from 4096 to 1073741824"]),
        (lambda: Chunks(in_flight=0), ["Chunks(in_flight)=0", "1 to 64"]),
        (lambda: Chunks(in_flight=65), ["Chunks(in_flight)=65", "1 to 64"]),
        (lambda: LocalOptions(stall_after=-1), ["stall_after=-1", "a number of seconds from 0.1 to 1e9"]),
        (lambda: LocalOptions(codec_threads=0), ["codec_threads=0", "1 to 256"]),
        (lambda: LocalOptions(codec_threads=100000), ["codec_threads=100000", "1 to 256"]),
        (lambda: LocalOptions(codec_threads=2.0), ["codec_threads=2.0", "whole number"]),
        (lambda: fusedcomm.Residuals("int8"), ["Feedback(format)='int8'", "'bf16'"]),
        (lambda: fusedcomm.Auto("bf16"), ["candidates='bf16' is one string", "('bf16',)"]),
        (lambda: fusedcomm.Auto(5), ["candidates=5", "pass a tuple"]),
        (lambda: fusedcomm.Auto(()), ["candidates=()", "leaves nothing to try"]),
        (lambda: fusedcomm.Auto(("fp7",)), ["candidates=('fp7',)", "'fp8'", "a fusedcomm.Config(…)"]),
        (lambda: fusedcomm.Auto((["bf16"],)), ["candidates=(['bf16'],)", "['bf16'] is not known"]),
        (lambda: fusedcomm.Auto(("off",)), ["candidates=('off',)", "DDP's own all-reduce is always tried"]),
        (lambda: fusedcomm.Auto(("int4",)), ["candidates=('int4',)", "fusedcomm.Config('int4') in its place"]),
        (lambda: fusedcomm.Auto(("bf16", Config())), ["Config(wire='bf16')", "has one of them twice"]),
        (lambda: fusedcomm.Auto(("bf16",) * 6), ["at most 5", "fusedcomm probe"]),
    ],
    ids=words_of,
)
def test_what_is_out_of_range_is_refused_with_what_is_possible(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == [], error.value


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: Config("bf16", blocks=Blocks(64)),
            ["Blocks(numel=64) has no effect", "wire='bf16'", "int8, fp8, int4"],
        ),
        (lambda: Config("bf16", blocks=Blocks(rotate=True)), ["rotate=True", "wire='bf16'", "int8, fp8, int4"]),
        (lambda: Config("int8", sum="direct"), ["sum='direct'", "wire='int8'", "sum='two-shot'"]),
        (lambda: Config("fp32", sum="direct"), ["sum='direct'", "wire='fp32'", "sum='exact'"]),
        (lambda: Config("bf16", sum="exact"), ["sum='exact'", "wire='bf16'", "wire='fp32'"]),
        (lambda: Config(sum="direct", wires={"1d": "fp32"}), ["sum='direct'", "wires['1d']='fp32'", "two-shot"]),
        (lambda: Config(sum="direct", wires={"w.0": "fp32"}), ["sum='direct'", "wires['w.0']='fp32'", "two-shot"]),
        (lambda: Config(sum="direct", wires={"a": "int8"}), ["sum='direct'", "wires={…: 'int8'}", "sum='two-shot'"]),
        (lambda: Config("fp32", "exact", wires={"a": "int8"}), ["sum='exact'", "wires={…: 'int8'}", "no other wires"]),
        (lambda: Config("bf16", predivide=2.0), ["predivide=2", "wire='bf16'", "fp16"]),
        (lambda: Config("fp32", feedback=Feedback()), ["Feedback('fp32')", "wire='fp32'", "rounds nothing"]),
        (lambda: Config(sum="direct", feedback=Feedback("bf16")), ["Feedback('bf16')", "sum='direct'", "two-shot"]),
        (
            lambda: Config("fp32", "exact", hosts=TwoLevels()),
            ["hosts=TwoLevels()", "sum='exact' has one", "'two-shot'"],
        ),
        (
            lambda: Config(sum="direct", hosts=TwoLevels()),
            ["hosts=TwoLevels()", "sum='direct' has one", "hosts='auto'"],
        ),
        (lambda: Config(sum="one-shot", hosts=2), ["hosts=2", "sum='one-shot' has one"]),
        (lambda: Config("fp32", hosts=TwoLevels("auto", "bf16")), ["local_wire='bf16'", "wire='fp32'"]),
    ],
    ids=words_of,
)
def test_two_options_that_exclude_each_other_are_refused_when_they_are_put_together_with_both_values(make, words):
    with pytest.raises(ValueError) as error:
        make()
    assert [word for word in words if word not in str(error.value)] == [], error.value
