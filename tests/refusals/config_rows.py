"""What a configuration refuses when it is made: values out of range, and pairs of values that exclude each other. An
error names both values of a pair."""

from refusals import rows
from torch import nn

import fusedcomm
from fusedcomm.config import Chunks, Config, LocalOptions, TwoLevels

OUT_OF_RANGE = [
    (lambda _: Config("fp7"), "wire='fp7' ... 'fp32', 'bf16', 'fp16', 'int8'"),
    (lambda _: Config(None), "wire=None"),
    (lambda _: Config("fp8_e5m2"), "wire='fp8_e5m2' ... 'int8', 'fp8', 'int4'"),
    (lambda _: Config(params="fp7"), "params='fp7' ... 'fp32', 'bf16', 'fp16', 'int8'"),
    (lambda _: Config(params="int8", params_kept=1), "params_kept=1 ... True or False"),
    (lambda _: Config(sum="ring"), "sum='ring' ... 'two-shot'"),
    (lambda _: Config(wires="bf16"), "wires='bf16' ... dict"),
    (lambda _: Config(wires={"a": "fp7"}), "wires['a']='fp7' ... 'fp8'"),
    (lambda _: Config(wires={"": "fp8"}), "wires[''] ... pattern"),
    (lambda _: Config(wires={5: "fp8"}), "wires[5] ... pattern"),
    (lambda _: Config(feedback=True), "feedback=True ... a fusedcomm.Feedback(…)"),
    (lambda _: Config(chunks=4096), "chunks=4096 ... a fusedcomm.Chunks(…)"),
    (lambda _: Config(compare_every=0), "compare_every=0 ... 1 or more, or None for never"),
    (lambda _: Config(compare_every=2.5), "compare_every=2.5 ... whole number"),
    (lambda _: Config(compare="stop"), "compare='stop' ... 'raise'"),
    (lambda _: Config(compare_every=2**70), f"compare_every={2**70} ... number of steps"),
    (lambda _: Config(hosts="by rack"), "hosts='by rack' ... 'auto'"),
    (lambda _: Config(hosts=[[0, "1"]]), "hosts=[[0, '1']] is not possible ... use 'auto'"),
    (lambda _: Config(hosts=[]), "hosts=[] ... it has no ranks"),
    (lambda _: Config(hosts=0), "hosts=0"),
    (lambda _: Config(hosts=[[0, 1], [1, 2]]), "rank(s) [1] are on two hosts"),
    (lambda _: Config(hosts=[[0, 1], [2]]), "hosts[0] has 2 ranks, hosts[1] 1"),
    (lambda _: TwoLevels("auto", "int8"), "TwoLevels(local_wire)='int8' is not known ... 'bf16'"),
    (lambda _: Chunks(100), "Chunks(nbytes)=100 ... 4096"),
    (lambda _: Chunks(2**63), f"Chunks(nbytes)={2**63} ... whole number of bytes"),
    (lambda _: Chunks(2**62), f"Chunks(nbytes)={2**62} ... from 4096 to 1073741824"),
    (lambda _: Chunks(in_flight=0), "Chunks(in_flight)=0 ... 1 to 64"),
    (lambda _: Chunks(in_flight=65), "Chunks(in_flight)=65 ... 1 to 64"),
    *(
        (lambda _, given=given: LocalOptions(stall_after=given), "stall_after= ... a number of seconds from 0.1 to 1e9")
        for given in (-1, 0.099, True, "60", float("nan"), 2e9, float("inf"), 10**400)
    ),
    (lambda _: LocalOptions(codec_threads=0), "codec_threads=0 ... 1 to 256"),
    (lambda _: LocalOptions(codec_threads=100000), "codec_threads=100000 ... 1 to 256"),
    (lambda _: LocalOptions(codec_threads=2.0), "codec_threads=2.0 ... whole number"),
]
PAIRS = [
    (lambda _: Config("int8", wires={"a.*": "off"}), "wires['a.*']='off' ... 'fp32'"),
    (lambda _: Config("fp32", weighted="median"), "weighted"),
]
MODEL = nn.ModuleDict({"norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)})
# Every parameter of these patterns goes elsewhere.
WIRES = [
    ("int8", {"norm.*": "bf16"}, "'norm.*' ... all 2 ... 'norm.weight' ... default pattern '1d'"),
    (
        "int8",
        {"head*": "bf16", "head.w*": "fp16", "1d": "int8"},
        "'head.w*' ... all 1 ... 'head.weight' ... wires pattern 'head*' ... Put it before",
    ),
    (
        "bf16",
        {"norm.*": "fp32", "head.bias": "int8", "1d": "fp16"},
        "wires pattern '1d' has no effect ... all 3 ... leave it out",
    ),
]
PAIRS += [
    (lambda _, given=given: Config(given[0], wires=given[1]).check_patterns(list(MODEL.named_parameters())), given[2])
    for given in WIRES
]
ROWS = rows("Config", 0, [(make, f"ValueError: ... {text}") for make, text in OUT_OF_RANGE + PAIRS])
ROWS += rows(
    "comm_hook", 0, [(lambda _: fusedcomm.comm_hook({}, None), "TypeError: ... CommState as its state, not dict")]
)
