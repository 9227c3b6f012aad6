"""Statistics as numbers for TensorBoard and Prometheus, as text, and with the label that each bucket has everywhere."""

import dataclasses
import json
import math
import re

import torch
from models import Gradients, synchronize
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.session.stats import Stats, StepTimes, step_times

MIB = 1 << 20

CRAFTED = dataclasses.replace(
    Stats(off=True),
    steps=4,
    buckets=8,
    grad_nbytes=88 * MIB,
    sent_nbytes=12 * MIB,
    sent_between_hosts_nbytes=4 * MIB,
    wire_ratio=0.25,
    exposed_ms=StepTimes(1.0, 2.0, 3.0),
    busy_ms=StepTimes(10.0, 20.0, 30.0),
    overlap=0.9,
    nonfinite=7,
    nonfinite_by_parameter={"body.weight": 1, "head.bias": 6},
    off=False,
)


def test_scalars_are_the_numbers_by_their_documented_names_which_prometheus_allows():
    assert CRAFTED.scalars() == {
        "steps": 4.0,
        "nonfinite": 7.0,
        "off": 0.0,
        "buckets_per_step": 2.0,
        "grad_nbytes_per_step": 22.0 * MIB,
        "wire_nbytes_per_step": 3.0 * MIB,
        "between_hosts_nbytes_per_step": 1.0 * MIB,
        "wire_ratio": 0.25,
        "overlap": 0.9,
        "exposed_ms/last": 1.0,
        "exposed_ms/p50": 2.0,
        "exposed_ms/p95": 3.0,
        "busy_ms/last": 10.0,
        "busy_ms/p50": 20.0,
        "busy_ms/p95": 30.0,
    }
    documented = fusedcomm.Stats.scalars.__doc__
    for name in CRAFTED.scalars():
        first, _, last = name.partition("/")
        assert first in documented and (not last or last in documented), name
        assert re.fullmatch(r"[a-z][a-z0-9_]*(/[a-z0-9_]+)?", name)
    of_prometheus = CRAFTED.scalars("_")
    assert of_prometheus == {name.replace("/", "_"): value for name, value in CRAFTED.scalars().items()}
    # What is not known yet is left out.
    assert Stats(off=True).scalars() == {"steps": 0.0, "nonfinite": 0.0, "off": 1.0}


def test_the_times_of_recent_steps_are_the_last_the_median_and_the_least_that_nineteen_of_twenty_keep_to():
    assert step_times([], 0) == StepTimes(None, None, None)
    assert step_times([5.0], 0) == StepTimes(5.0, 5.0, 5.0)
    hundred = [float((37 * i) % 100 + 1) for i in range(100)]  # 1 to 100 in no order
    assert step_times(hundred, 3) == StepTimes(hundred[3], 50.5, 95.0)
    assert step_times([1.0, 2.0, 3.0, 4.0], 0).p95 == 4.0


def test_statistics_print_as_an_aligned_table_and_show_as_one_line():
    assert repr(CRAFTED) == f"Stats(steps=4, sent_nbytes={12 * MIB}, wire_ratio=0.25, exposed_ms_p50=2, nonfinite=7)"
    assert str(CRAFTED).splitlines() == [
        "fusedcomm: 4 steps of this rank",
        "  sent           3.000 MiB a step, 0.250 of an uncompressed all-reduce",
        "  between hosts  1.000 MiB a step",
        "  exposed        2.00 ms a step, p95 3.00 ms, last 1.00 ms",
        "  busy           20.00 ms a step, p95 30.00 ms, last 10.00 ms",
        "  overlap        90% of the busy time",
        "  NaN or Inf     7 elements of gradients, most in head.bias",
    ]
    assert repr(Stats(off=True)) == "Stats(steps=0, off=True)"
    assert str(Stats(off=True)) == "fusedcomm: off, DDP's own all-reduce, which is not counted"
    assert str(dataclasses.replace(Stats(off=True), off=False)) == "fusedcomm: no step has ended yet"


# --- real ranks -----------------------------------------------------------------------------------------------------


def watched(rank, world_size, folder):
    """Everything that names the buckets of a module, the numbers of its statistics, and what the handle shows before
    and after detach()."""
    ddp = DistributedDataParallel(Gradients((90, 60), (80, 70)), bucket_cap_mb=0.02)
    comm = fusedcomm.attach(ddp, Config("int8", "two-shot"), quiet=True)
    labels, shown = {"before": [row.label for row in comm.plan().buckets]}, [repr(comm), str(comm)]
    synchronize(ddp, [torch.ones(90, 60), torch.ones(80, 70)], steps=3)
    with comm.trace(f"{folder}/trace-{{rank}}.json"):
        synchronize(ddp, [torch.full((90, 60), math.inf), torch.ones(80, 70)], steps=2)
    stats = comm.stats()
    events = json.load(open(f"{folder}/trace-{rank}.json"))["traceEvents"]
    labels["plan"] = [row.label for row in comm.plan().buckets]
    labels["trace"] = sorted({e["args"]["bucket"] for e in events if e.get("args", {}).get("stage") == "pack"})
    labels["report"] = sorted({row.bucket for row in comm.nonfinite_report()})
    shown.append(str(comm))
    comm.detach()
    return labels, stats, [*shown, repr(comm), str(comm)]


def test_a_bucket_has_the_same_label_in_plan_statistics_trace_and_report(ranks, tmp_path):
    for labels, stats, shown in ranks.run(watched, str(tmp_path), world_size=2):
        expected = [
            f"bucket 0 (weights.1; 1 parameters, {80 * 70 * 4 / MIB:.6g} MiB)",
            f"bucket 1 (weights.0; 1 parameters, {90 * 60 * 4 / MIB:.6g} MiB)",
        ]
        for where, found in labels.items():
            assert found == (expected[1:] if where == "report" else expected), where
        scalars = stats.scalars()
        assert scalars["steps"] == 5 and scalars["buckets_per_step"] == (1 + 4 * 2) / 5
        assert scalars["between_hosts_nbytes_per_step"] == 0 < scalars["wire_nbytes_per_step"]
        assert scalars["grad_nbytes_per_step"] == (90 * 60 + 80 * 70) * 4
        assert 0 < scalars["exposed_ms/p50"] <= scalars["exposed_ms/p95"] and scalars["exposed_ms/last"] > 0
        line, before, after, *detached = shown
        assert line == "<fusedcomm.Handle: wire int8, sum two-shot, 2 ranks>"
        assert detached == ["<fusedcomm.Handle: detached>"] * 2
        assert before.startswith("fusedcomm: wire int8, sum two-shot, ")
        assert before.endswith("\nfusedcomm: no step has ended yet")
        assert "fusedcomm: 5 steps of this rank\n  sent " in after
