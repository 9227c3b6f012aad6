"""``fusedcomm probe``: fits, choices, scripts, and the whole on real ranks within a tiny budget."""

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import on_host
from test_cost_model import linear_gradients

from fusedcomm import groups, output
from fusedcomm.cli import main
from fusedcomm.config import Config
from fusedcomm.cost_model import Cluster, Codec, Cost, Network, TwoLevels, Workload
from fusedcomm.probe import fit, report
from fusedcomm.probe.check import Check
from fusedcomm.probe.choices import (
    FASTEST_BYTES_S,
    OFF,
    Way,
    at_rate,
    crossover_bytes_s,
    finalists,
    link_bytes_s,
    options,
    predict_option,
    recommend,
)
from fusedcomm.probe.network import (
    BETWEEN,
    ON_TWO_LEVELS,
    WITHIN,
    MeasuredNetwork,
    Sample,
    measure_network,
    with_cpu_of_messages,
)
from fusedcomm.probe.network import fit as fit_network
from fusedcomm.probe.run import Settings, probe
from fusedcomm.probe.speed import slowdown, slowed
from fusedcomm.probe.steps import CpuOfSteps, attributed
from fusedcomm.probe.team import ProbeError, Team
from fusedcomm.probe.traced import stage_points
from fusedcomm.probe.workload import Synthetic, checked, load

pytestmark = pytest.mark.alone

TINY = Settings(params=300_000, seconds=5.0, wires=("bf16", "int8"), accept=("bf16",), caps_mb=(25.0,))

# ---- fits


def test_a_line_is_found_among_disturbed_times():
    points = [(units, 2e-4 + units * 8e-9) for units in (1e4, 3e4, 1e5, 3e5, 1e6, 3e6, 1e7)]
    points[2] = (points[2][0], 5 * points[2][1])
    found = fit.theil_sen(points)
    assert found.fixed_s == pytest.approx(2e-4, rel=0.05)
    assert found.per_unit_s == pytest.approx(8e-9, rel=0.01)


def test_fits_are_never_negative():
    assert fit.theil_sen([(1.0, 2.0), (2.0, 1.0)]) == Cost(1.5, 0.0)
    assert fit.theil_sen([(1.0, 1.0), (2.0, 3.0)]) == Cost(0.0, 2.0)
    assert fit.theil_sen([(4.0, 2.0)]) == Cost(0.0, 0.5)
    with pytest.raises(ValueError, match="measure at least two sizes"):
        fit.theil_sen([(4.0, 2.0), (4.0, 3.0)])


@pytest.mark.parametrize("latency_s, occupied_s", [(1e-3, 2e-4), (3e-4, 0.0)])
def test_latency_and_rate_of_a_network(latency_s, occupied_s):
    per_byte_s, noise = 8e-9, random.Random(0)
    samples = []
    for nbytes in (32 << 10, 128 << 10, 512 << 10):
        for num_messages, in_flight in ((1, 1), (20, 4)):
            busy_s = num_messages * (occupied_s + nbytes * per_byte_s)
            seconds = [busy_s + (latency_s - occupied_s) * (in_flight == 1) for _ in range(9)]
            seconds = [value * noise.choice((1, 1, 1, 1.01, 3)) for value in seconds]
            cpu_s = 9 * num_messages * nbytes * 1e-9
            samples.append(Sample("exchange", nbytes, nbytes, num_messages, in_flight, seconds, cpu_s))
    found = fit_network(samples)
    assert found.per_unit_s == pytest.approx(per_byte_s, rel=0.03)
    assert found.fixed_s == pytest.approx(latency_s, rel=0.1)
    assert found.occupied_s == pytest.approx(occupied_s, abs=3e-5)
    assert found.cpu_s_per_unit == pytest.approx(1e-9)


def test_cpu_time_of_messages_is_told_from_that_of_bytes():
    samples = []
    for nbytes in (32 << 10, 128 << 10, 512 << 10):
        cpu_s = 3 * 20 * (1e-4 + nbytes / 2 * 1e-9)  # of one of two ranks of a host that sends so much
        samples.append(Sample(BETWEEN, nbytes, nbytes, 1, 1, [1.0] * 3, 1.0))
        samples.append(Sample(BETWEEN, nbytes, nbytes, 20, 4, [1.0] * 3, cpu_s))
    found = with_cpu_of_messages(Cost(1.0, 2.0), samples, 2)
    assert (found.fixed_s, found.per_unit_s) == (1.0, 2.0)
    assert (found.cpu_fixed_s, found.cpu_s_per_unit) == pytest.approx((1e-4, 1e-9))


def test_small_messages_that_stall_each_other_do_not_change_the_rate():
    def sample(nbytes: int, num_messages: int, seconds: float) -> Sample:
        return Sample("all_reduce", nbytes, nbytes, num_messages, min(num_messages, 2), [seconds], 1.0)

    samples = [sample(1 << 16, 1, 4e-4), sample(1 << 16, 4, 8e-3), sample(1 << 20, 1, 9e-3), sample(1 << 20, 4, 35e-3)]
    assert fit_network(samples).per_unit_s == pytest.approx(1 / 118e6, rel=0.03)


# ---- choices


def cluster(bytes_s: float, codec_s: float = 1e-10, world_size: int = 2) -> Cluster:
    """On which a collective is limited by its bytes."""
    link = Cost(1e-4, 1 / bytes_s)
    codec = Codec(*[Cost(0.0, codec_s)] * 4)
    network = Network(all_reduce=link, exchange=link, direct=link)
    codecs = dict.fromkeys(("fp32", "bf16", "int8", "int4"), codec)
    return Cluster(world_size, network, codecs, 1e-10, cores=8.0, link_bytes_s=bytes_s)


def workload(backward_s: float, numel: int = 10_000_000) -> Workload:
    return Workload(0.0, backward_s, 0.0, linear_gradients([numel // 20] * 20, backward_s))


def recommended(bytes_s: float, backward_s: float, accept=("bf16", "int8"), caps=(25.0,), **kwargs):
    found = options(workload(backward_s), cluster(bytes_s, **kwargs), ("bf16", "int8", "int4"), caps)
    return recommend(found, accept)


def test_where_bytes_are_dear_the_fewest_are_recommended():
    found = recommended(bytes_s=1e8, backward_s=0.0)
    assert not found.leave_off and found.option.name == "int8" and 0.7 < found.gain < 0.8
    assert found.faster.wire == "int4"
    assert found.option.code == 'ddp = DistributedDataParallel(model); comm = fusedcomm.attach(ddp, wire="int8")'
    assert "are spent waiting for gradients" in found.reason
    assert recommended(1e8, 0.0, accept=("int4",)).faster is None


def test_of_choices_that_are_as_fast_the_more_exact_is_recommended():
    # All but the last bucket is hidden with either.
    found = recommended(bytes_s=1e8, backward_s=1.3)
    assert found.option.name == "bf16" and found.option.cap_mb == 25


def test_left_off_where_communication_is_hidden():
    found = recommended(bytes_s=1e10, backward_s=2.0)
    assert found.leave_off and "hidden behind the backward pass" in found.reason


def test_left_off_where_bytes_are_nearly_free():
    found = recommended(bytes_s=2e10, backward_s=0.0, codec_s=5e-9)
    assert found.leave_off and "bytes are nearly free here" in found.reason


def test_left_off_where_nothing_is_accepted():
    found = recommended(bytes_s=1e8, backward_s=0.0, accept=())
    assert found.leave_off and "no wire of ours was accepted" in found.reason and found.faster.wire == "int4"


def test_another_bucket_size_may_be_all_that_helps():
    found = recommended(bytes_s=1e8, backward_s=0.4, accept=(), caps=(1.0, 25.0))
    assert found.baseline.cap_mb == 25 and found.option.wire == OFF
    assert found.option.code.endswith("(model, bucket_cap_mb=1)") and found.gain > 0.03


def test_what_was_measured_decides_among_those_that_may_be_fastest():
    accepted = ("bf16", "int8", "int4")
    found = options(workload(0.1), cluster(3e8), ("bf16", "int8", "int4"), (5.0, 25.0))
    predicted = recommend(found, accepted)
    chosen = finalists(found, predicted, accepted)
    assert chosen[:2] == [predicted.baseline, predicted.option] and len(chosen) == len(set(chosen)) <= 5
    bf16 = next(option for option in chosen if option.wire == "bf16")

    def settled(**steps_s: float):
        return recommend(found, accepted, {option: steps_s.get(option.wire, 0.5) for option in chosen})

    other = settled(bf16=0.3, off=0.6)
    assert other.option == bf16 and other.measured and (other.step_s, other.baseline_s, other.gain) == (0.3, 0.6, 0.5)
    assert "of 600.0 ms with DDP's own all-reduce" in other.reason and not predicted.measured
    # As fast but for noise: the more exact.
    assert settled(bf16=0.5, off=0.6).option == bf16
    none = settled(off=0.4)
    assert none.leave_off and none.option == none.baseline and "off 400.0 ms" in none.reason


def test_ddp_itself_with_better_buckets_is_tried():
    found = options(workload(0.1), cluster(1e9), ("bf16", "int8"), (5.0, 25.0))
    for accepted in (("bf16", "int8"), ()):
        chosen = finalists(found, recommend(found, accepted), accepted)
        assert {(option.name, option.cap_mb) for option in chosen} >= {(OFF, 25.0), (OFF, 5.0)}


def test_at_least_one_of_ours_is_tried():
    found = options(workload(0.0), cluster(2e10, codec_s=5e-9), ("bf16", "int8"), (25.0,))
    off, ours = finalists(found, recommend(found, ("int8",)), ("int8",))
    assert (off.name, ours.name) == (OFF, "int8")
    assert len(finalists(found, recommend(found, ()), ())) == 1


@pytest.mark.parametrize("world_size", [2, 4])
def test_both_sums_of_a_16_bit_wire_are_predicted(world_size):
    found = options(workload(0.0), cluster(1e8, world_size=world_size), ("bf16", "int8"), (25.0,))
    assert [option.name for option in found] == [OFF, "bf16", "bf16 direct", "int8"]


def test_a_link_is_as_fast_as_it_was_seen_to_be():
    """Bytes of messages that are mostly other work can cost less than they take."""
    seen = dataclasses.replace(cluster(2e8), link_bytes_s=1e8)
    assert (link_bytes_s(cluster(2e8)), link_bytes_s(seen)) == (2e8, 1e8)
    twice = at_rate(seen, 2e8)
    assert link_bytes_s(twice) == 2e8 and twice.network.exchange.per_unit_s == pytest.approx(1 / 4e8)
    assert at_rate(seen, 5e7).network.exchange.per_unit_s == pytest.approx(1 / 5e7)
    samples = [Sample("direct", 4096, n, 1, 4, [n / rate]) for n, rate in ((1000, 2e6), (9000, 5e6), (3000, 1e6))]
    found = MeasuredNetwork(seen.network, [*samples, Sample("direct", 4096, 1000, 1, 1, [1e-9])], None)
    assert found.carried_bytes_s("direct") == pytest.approx(5e6)


def by_host(bytes_s: float, local_bytes_s: float) -> Cluster:
    """Four ranks on two hosts."""
    link = Cost(1e-4, 1 / bytes_s, cpu_s_per_unit=1e-9)
    network = Network(all_reduce=link, exchange=link, direct=link)
    free, local = Cost(0.0, 0.0), Cost(1e-5, 1 / local_bytes_s, cpu_s_per_unit=1e-9)
    two_levels = TwoLevels(network, Network(free, local))
    shared = {"ranks_per_host": 2, "local": Network(free, free), "two_levels": two_levels}
    return dataclasses.replace(cluster(bytes_s, world_size=4), network=network, **shared)


def test_sums_on_two_levels_are_recommended_where_hosts_share_a_slow_link():
    for local_bytes_s, wins in ((1e10, True), (1e7, False)):
        found = options(workload(0.0), by_host(1e8, local_bytes_s), ("fp32", "bf16", "int8"), (25.0,))
        names = [option.name for option in found]
        assert names == [OFF, "fp32", "bf16", "bf16 direct", "bf16 by host", "int8", "int8 by host"]
        sent = {option.name: option.prediction.sent_nbytes / 1e7 for option in found}
        # By a host: a ring's leave it once, of two-shot sums half of all that its two ranks send stay on it.
        expected = {OFF: 6, "bf16": 4, "bf16 direct": 3, "bf16 by host": 2}
        assert {name: sent[name] for name in expected} == pytest.approx(expected, rel=0.01)
        recommendation = recommend(found, ("bf16", "int8"))
        assert (recommendation.option.name == "int8 by host") == wins
        assert recommendation.option.code.endswith('wire="int8", hosts="auto")') == wins


def test_another_link_is_another_one_for_sums_on_two_levels_too():
    here = by_host(1e8, 1e10)
    there = at_rate(here, 5e8)
    assert there.two_levels.network.exchange.per_unit_s == pytest.approx(1 / 5e8)
    assert there.two_levels.local == here.two_levels.local
    fast, slow = (
        crossover_bytes_s(workload(0.0), by_host(1e8, rate), Way("int8", hosts="auto"), 25.0) for rate in (1e10, 1e7)
    )
    assert fast > 1e9 > slow
    flat = crossover_bytes_s(workload(0.0), here, Way("int8"), 25.0)
    assert flat == crossover_bytes_s(workload(0.0), by_host(1e8, 1e7), Way("int8"), 25.0) > 1e9


def test_the_link_up_to_which_a_wire_pays():
    slow = cluster(1e8, codec_s=2e-9)
    until = crossover_bytes_s(workload(0.0), slow, Way("int8"), 25.0)
    assert 1e8 < until < FASTEST_BYTES_S
    for factor, pays in ((0.9, True), (1.1, False)):
        there = at_rate(slow, factor * until)
        assert link_bytes_s(there) == pytest.approx(factor * until)
        off, _, _, int8 = options(workload(0.0), there, ("bf16", "int8"), (25.0,))
        assert (int8.prediction.step_s < 0.97 * off.prediction.step_s) == pays
    assert crossover_bytes_s(workload(100.0), slow, Way("int8"), 25.0) < 1e8
    assert crossover_bytes_s(workload(0.0), cluster(1e8, codec_s=1e-4), Way("int8"), 25.0) is None


# ---- what moving bytes takes of a core


def cpu_of_steps(elements_s: float, per_byte_s: dict[str, float]) -> list[CpuOfSteps]:
    sent = (("exchange", 10**7), ("exchange", 2 * 10**7), ("direct", 2 * 10**7), ("all_reduce", 4 * 10**7))
    return [CpuOfSteps(kind, nbytes, elements_s + per_byte_s[kind] * nbytes) for kind, nbytes in sent]


def test_cpu_time_is_attributed_to_elements_and_bytes():
    numel, plain = 10**7, cluster(1e9)
    costs = {kind: Cost(0.0, 1e-9, 0.0, 5e-10) for kind in ("all_reduce", "exchange", "direct")}
    plain = dataclasses.replace(plain, network=Network(**costs), copy_s_per_byte=1e-10)
    per_byte_s = {"exchange": 2e-10, "direct": 1e-9, "all_reduce": 6e-10}
    found = attributed(plain, numel, cpu_of_steps(4e-3, per_byte_s))
    for kind in costs:
        assert getattr(found.network, kind).cpu_s_per_unit == pytest.approx(per_byte_s[kind])
        assert getattr(found.network, kind).per_unit_s == 1e-9
    assert found.copy_s_per_byte == pytest.approx(1e-10 + 4e-3 / 8e7)
    # What cannot be is not believed.
    wild = attributed(plain, numel, cpu_of_steps(-1.0, {"exchange": 1.0, "direct": -1.0, "all_reduce": 1.0}))
    assert wild.network.exchange.cpu_s_per_unit == wild.network.all_reduce.cpu_s_per_unit == pytest.approx(1.5e-9)
    assert wild.network.direct.cpu_s_per_unit == pytest.approx(5e-10 / 3) and wild.copy_s_per_byte == 3e-10


# ---- scripts


SCRIPT = """
import torch
def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    data = torch.randn(8, 64)
    return model, lambda model: model(data).square().mean(), torch.optim.SGD(model.parameters(), 0.1)
"""


def script(tmp_path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


def test_a_script(tmp_path):
    model, step, optimizer = checked(load(script(tmp_path, SCRIPT))())
    assert step(model).numel() == 1 and optimizer is not None
    assert all(parameter.grad is None for parameter in model.parameters())
    named = script(tmp_path, SCRIPT.replace("make", "build"))
    assert callable(load(f"{named}:build"))


def test_scripts_that_cannot_be_used(tmp_path):
    with pytest.raises(ProbeError, match="there is no file .*missing.py: name a Python file"):
        load(str(tmp_path / "missing.py"))
    with pytest.raises(ProbeError, match=r"has no function make\(\): it must return .* functions there: build"):
        load(script(tmp_path, SCRIPT.replace("make", "build")))
    with pytest.raises(ProbeError, match=r"has no function build\(\)"):
        load(script(tmp_path, SCRIPT) + ":build")
    with pytest.raises(ProbeError, match="running it failed: ZeroDivisionError"):
        load(script(tmp_path, "1 / 0"))


LINEAR = torch.nn.Linear(3, 3)
DATA = torch.ones(2, 3)


@pytest.mark.parametrize(
    "task, text",
    [
        (LINEAR, "returned a Linear: it must return"),
        ((LINEAR,), r"returned \(Linear\): it must return"),
        ((LINEAR, 3), r"returned \(Linear, int\)"),
        ((LINEAR, lambda model: model(DATA).sum(), "sgd"), "third result is a str"),
        ((torch.nn.ReLU(), lambda model: model(DATA).sum()), "no parameter with requires_grad"),
        ((torch.nn.Linear(3, 3, dtype=torch.float64), lambda model: 0), "parameters of torch.float64"),
        ((LINEAR, lambda model: model(DATA)), r"returned a tensor of shape \(2, 3\): it must return the loss"),
        ((LINEAR, lambda model: 3.0), "returned a float"),
        ((LINEAR, lambda model: model(DATA).sum().detach()), r"shape \(\) without a gradient"),
    ],
)
def test_tasks_that_cannot_be_used(task, text):
    with pytest.raises(ProbeError, match=text):
        checked(task)


# ---- the whole


def run_probe(rank, world_size, settings):
    torch.manual_seed(0)
    findings = probe(settings, dist.group.WORLD, torch.device("cpu"))
    return report.as_json(findings), report.text(findings), [option.name for option in findings.options]


@pytest.fixture(scope="module")
def probed(ranks):
    began = time.monotonic()
    outcomes = ranks.run(run_probe, TINY, world_size=2)
    return outcomes, time.monotonic() - began


def test_the_budget_is_respected(probed):
    outcomes, seconds = probed
    # Other tests may use this machine, too.
    assert outcomes[0][0]["seconds"]["all"] < TINY.seconds + 15, outcomes[0][0]["seconds"]
    assert seconds < TINY.seconds + 30


def test_the_json_has_everything(probed):
    (document, _, names), (others, _, _) = probed[0]
    document = json.loads(json.dumps(document))
    assert names == [OFF, "bf16", "bf16 direct", "int8"]
    assert [row["name"] for row in document["predictions"]] == names
    assert all(row["step_s"] > 0 and row["num_buckets"] == 1 for row in document["predictions"])
    sent = {row["name"]: row["sent_nbytes"] / TINY.params for row in document["predictions"]}
    assert (sent[OFF], sent["bf16"]) == pytest.approx((4, 2), rel=0.01) and sent["int8"] == pytest.approx(
        1.03, rel=0.02
    )
    assert document["network"]["link_bytes_s"] > 0
    for kind in ("all_reduce", "exchange", "direct"):
        assert document["network"][kind]["per_unit_s"] >= 0 and document["network"][kind]["fixed_s"] >= 0
        of_kind = [sample for sample in document["network"]["samples"] if sample["kind"] == kind]
        assert {sample["in_flight"] > 1 for sample in of_kind} == {True, False}
        assert all(min(sample["seconds"]) > 0 for sample in of_kind)
    assert document["network"]["exchange"]["cpu_s_per_unit"] > 0
    assert set(document["local"]["codecs"]) == set(document["local"]["points"]) == {"fp32", "bf16", "int8"}
    assert 0 < document["local"]["cores"] <= os.cpu_count()
    assert document["workload"]["numel"] == TINY.params and document["workload"]["backward_s"] > 0
    assert set(document["crossover_bytes_s"]) == {"bf16", "int8"}
    baseline, *ours = document["check"]
    assert baseline["name"] == OFF and ours and {row["name"] for row in ours} <= {"bf16", "bf16 direct"}
    assert all(row["measured_s"] > 0 and row["ratio"] > 0 for row in document["check"])
    recommendation = document["recommendation"]
    assert recommendation["baseline"]["name"] == OFF and recommendation["reason"]
    if recommendation["measured"]:
        measured_s = {row["name"]: row["measured_s"] for row in document["check"]}
        assert recommendation["step_s"] == measured_s[recommendation["option"]["name"]]
        assert recommendation["step_s"] <= 1.05 * min(measured_s.values())
    assert document["environment"]["world_size"] == 2 and document["environment"]["device"] == "cpu"
    # What decides is the same on every rank.
    for key in ("predictions", "recommendation", "crossover_bytes_s", "workload"):
        assert document[key] == json.loads(json.dumps(others[key])), key


def network_measured(rank, world_size, s_per_byte):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "time_link", lambda backend: s_per_byte)
        found = measure_network(Team(dist.group.WORLD, torch.device("cpu")), 0.5)
    return {kind: sorted({s.nbytes for s in found.samples if s.kind == kind}) for kind in ("exchange", "direct")}


@pytest.mark.parametrize("s_per_byte", [8e-8, 1e-11])
def test_messages_are_of_the_sizes_that_suit_the_link(ranks, s_per_byte):
    """Of two ranks on a slow link the smallest are as long as what is sent before their sizes are known."""
    of_all, *others = ranks.run(network_measured, s_per_byte, world_size=2)
    for kind in ("exchange", "direct"):
        # An all-gather of two ranks is an exchange of both ranks' chunks.
        num_chunks, sum = (2, "one-shot") if kind == "exchange" else (1, "direct")
        message = num_chunks * Config(sum=sum).resolved(2, "cpu", s_per_byte).chunk_nbytes
        assert of_all[kind] == sorted({4 << 10, message // 16, message // 4, message}) and others[0] == of_all


def run_probe_on_hosts(rank, world_size, settings, names):
    with on_host(names[rank]):
        return run_probe(rank, world_size, settings)


def test_hosts_with_several_ranks(ranks):
    settings = dataclasses.replace(TINY, wires=("int8",), accept=("int8",), cores=0.5)
    (document, text, names), *others = ranks.run(run_probe_on_hosts, settings, ["a", "b", "a", "b"])
    assert names == [OFF, "int8", "int8 by host"] and all(theirs[2] == names for theirs in others)
    assert document["environment"]["ranks_per_host"] == 2 and document["environment"]["uneven_hosts"] == ""
    sent = [row["sent_nbytes"] / settings.params for row in document["predictions"]]
    assert sent == pytest.approx([6, 2 * 1.03, 1.03], rel=0.02)
    samples = document["network"]["samples"]
    largest = {
        kind: max(s["sent_nbytes"] / s["nbytes"] for s in samples if s["kind"] == kind) for kind in ON_TWO_LEVELS
    }
    assert largest == {"exchange": 1, "direct": 1.5, "all_reduce": 1.5, BETWEEN: 1, WITHIN: 0.5}
    for level in ("network", "local"):
        cost = document["network"]["two_levels"][level]["exchange"]
        assert cost["per_unit_s"] > 0 and cost["fixed_s"] >= 0 and cost["cpu_s_per_unit"] > 0
    assert set(document["local"]["codecs"]) == {"fp32", "int8", "bf16"}  # what travels within a host
    assert set(document["crossover_bytes_s"]) == {"int8", "int8 by host"}
    assert {row["hosts"] for row in document["check"]} >= {None}
    for part in ("all-to-all between hosts", "all-to-all within a host", "MB/s a host", "sent by a host"):
        assert part in text
    assert "fewer cores than ranks" in text


def test_hosts_with_different_numbers_of_ranks_have_no_sums_on_two_levels(ranks):
    settings = dataclasses.replace(TINY, wires=("bf16",), cores=1.0)
    (document, text, names), *_ = ranks.run(run_probe_on_hosts, settings, ["a", "a", "b"], world_size=3)
    assert names == [OFF, "bf16", "bf16 direct"] and document["network"]["two_levels"] is None
    assert "host a has 2 ranks, host b 1" in text and "MB/s a rank" in text and "fewer cores" not in text


def test_the_text_says_what_to_do(probed):
    (_, text, _), _ = probed[0]
    assert "Recommended: ddp = " in text or "Leave it off: " in text
    for part in ("predicted step, ms", "checked against real steps:", "all-to-all", "bf16 direct"):
        assert part in text


def run_beside_work(rank, world_size, settings):
    """The probe's document, and how long the same work has taken before and after it, in seconds."""
    team = Team(dist.group.WORLD, torch.device("cpu"))

    def seconds():
        model = Synthetic(settings.params, settings.backward_s, team.device)
        return statistics.median(team.time(lambda: [model._compute() for _ in model.weights], 5))

    before_s = seconds()
    document, _, _ = run_probe(rank, world_size, settings)
    return document, (before_s, seconds())


def test_a_backward_pass_takes_as_long_as_it_should(ranks):
    settings = dataclasses.replace(TINY, backward_s=0.05, wires=("bf16",))
    (document, beside_s), _ = ranks.run(run_beside_work, settings, world_size=2)
    # By the machine's speed then; which is about what was asked for, unless other work comes and goes.
    assert min(beside_s) / 3 < document["workload"]["backward_s"] < 3 * max(beside_s)
    assert 0.05 / 8 < statistics.median(beside_s) < 0.05 * 8
    ready = [gradient["ready_s"] for gradient in document["workload"]["gradients"]]
    assert ready == sorted(ready)


def failing_script(rank, world_size, paths):
    try:
        probe(dataclasses.replace(TINY, script=paths[rank]), dist.group.WORLD, torch.device("cpu"))
    except ProbeError as error:
        return str(error)


def test_a_script_that_fails_fails_on_every_rank(ranks, tmp_path):
    good = script(tmp_path, SCRIPT)
    missing = ranks.run(failing_script, [good, str(tmp_path / "no.py")], world_size=2)
    assert missing[0] == missing[1] and missing[0].startswith("on rank 1: --script")
    other = tmp_path / "other.py"
    other.write_text(SCRIPT.replace("256", "128"))
    different = ranks.run(failing_script, [good, str(other)], world_size=2)
    assert different == ["the ranks' models differ: rank 1 has other parameters than rank 0"] * 2


def traced(rank, world_size):
    team = Team(dist.group.WORLD, torch.device("cpu"))
    return [stage_points(team, wire) for wire in ("int8", "fp32", "bf16")]


def test_stages_from_traces(ranks):
    """As on an accelerator, where they cannot be called by themselves."""
    of_three, of_two = (ranks.run(traced, world_size=p)[0] for p in (3, 2))
    two_shot = ["pack", "reduce", "unpack"]
    assert [list(points) for points in of_three] == [two_shot, ["pack"], two_shot]
    # In one shot; but 16-bit wires can be summed directly, too, and then nothing is summed by unpack.
    assert [list(points) for points in of_two] == [["pack", "sum"], ["pack"], ["pack", "sum", "unpack"]]
    for points in (points for of_wire in (*of_three, *of_two) for points in of_wire.values()):
        assert all(numel > 10_000 and 1e-6 < seconds < 1 for numel, seconds in points)


# ---- the command


@pytest.mark.parametrize(
    "arguments, text",
    [
        (("--wires", "int3"), "--wires int3: no such wire"),
        (("--wires", "bf16", "--accept", "int8"), "--accept int8: it is not among --wires bf16"),
        (("--seconds", "1"), "--seconds 1 is too short: use at least 5"),
        (("--params", "0"), "--params must be at least 1"),
        (("--caps", "-1"), "bucket sizes are numbers of MiB above 0"),
        (("--cores", "0"), "--cores 0 is not possible"),
        (("--script", "no.py"), "--script no.py: there is no file no.py"),
        (
            ("--script", "no.py", "--params", "1e6"),
            "--params 1e+06 is of the step without a script, and --script no.py",
        ),
        (("--backward-ms", "0", "--script", "no.py"), "--backward-ms 0 is of the step without a script"),
        (("--plot", "probe.txt"), "--plot probe.txt: a picture's name ends in one of .png, .pdf, .svg"),
        (("--json", "/dev/null/probe.json"), "--json /dev/null/probe.json: its folder cannot be made"),
        (("--json", "/"), "--json / is a folder"),
    ],
)
def test_refusals(capsys, arguments, text):
    with pytest.raises(SystemExit) as stopped:
        main(["probe", *arguments])
    assert stopped.value.code == 2 and text in capsys.readouterr().err


def test_one_rank_is_refused(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(SystemExit) as stopped:
        main(["probe"])
    assert stopped.value.code == 2 and "torchrun started one rank" in capsys.readouterr().err


def run_command(tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    files = ("--json", str(tmp_path / "new" / "p.json"), "--plot", str(tmp_path / "p.png"))
    command = [sys.executable, "-m", "fusedcomm", "probe", *files, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def test_the_command_without_torchrun(tmp_path):
    """And a script, and the picture."""
    pytest.importorskip("matplotlib")
    done = run_command(tmp_path, "--seconds", "5", "--wires", "bf16", "--script", script(tmp_path, SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on this machine's loopback" in done.stdout and "torchrun" in done.stdout
    document = json.loads((tmp_path / "new" / "p.json").read_text())
    assert document["workload"]["numel"] == 64 * 256 + 256 + 256 * 10 + 10
    assert document["workload"]["optimizer_s"] > 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_wrong_with_a_script_is_said_once(tmp_path):
    done = run_command(tmp_path, "--script", script(tmp_path, "make = 3"))
    assert done.returncode == 2 and done.stderr.count("has no function make()") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_no_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib, which is not installed: pip install matplotlib"):
        output.pyplot()


# ---- bench/probe_check.py


def test_errors_and_regret(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parent.parent / "bench"))
    import probe_check
    from _common import Row

    def row(impl: str, measured_s: float, predicted_s: float) -> Row:
        figures = {"ratio": predicted_s / measured_s, "ratio_at_speed": 1 + 0.4 * (predicted_s / measured_s - 1)}
        return Row("1gbit/mix 0", impl, 1000, 4000, measured_s, measured_s, True, figures=figures)

    rows = [row("off 25", 1.0, 1.1), row("bf16 25", 0.5, 0.49), row("int8 25", 0.4, 0.5)]
    by_default = {"recommended": "bf16 25", "among": ["off 25", "bf16 25", "not measured 25"]}
    found = probe_check.verdict(rows, {"recommended": "bf16 25", "by_default": by_default})
    assert found["max_error"] == pytest.approx(0.25) and found["median_error"] == pytest.approx(0.1)
    assert found["max_error_at_speed"] == pytest.approx(0.1)
    assert (found["recommended"], found["best"]) == ("bf16 25", "int8 25") and found["regret"] == pytest.approx(0.25)
    assert (found["by_default"]["best"], found["by_default"]["regret"]) == ("bf16 25", 0)
    assert probe_check.verdict([], {"recommended": "bf16 25", "by_default": by_default}) == {}
    arguments = argparse.Namespace(hosts=2, params=None)
    assert probe_check.settings_of(arguments, "1gbit", 0.5)["compute_ms"] == pytest.approx(150)
    assert probe_check.settings_of(arguments, "unlimited", 0)["params"] == probe_check.MAX_PARAMS


def steps_on_slower_cores(factor, step, ranks, names=(OFF, "bf16", "int8")):
    """Checks whose steps took as long as on cores that are so much slower."""
    checks = []
    for way in map(Way, names):
        taken = predict_option(slowed(step, factor), slowed(ranks, factor), way, 25).prediction.step_s
        checks.append(Check(predict_option(step, ranks, way, 25), step.numel, taken, [taken]))
    return checks


def test_real_steps_tell_how_fast_the_cores_are():
    step = workload(0.2)
    busy = cluster(1e11, codec_s=1e-8)
    for factor in (0.85, 1.0, 1.2):
        found = slowdown(step, busy, steps_on_slower_cores(factor, step, busy))
        assert 1 + 0.6 * (factor - 1) <= found <= factor or factor < 1 and factor <= found <= 1 + 0.6 * (factor - 1)
    # Steps that wait for the network do not tell.
    waiting, idle = cluster(1e7), workload(1e-3)
    checks = steps_on_slower_cores(1.0, idle, waiting)
    longer = [dataclasses.replace(check, measured_s=1.1 * check.measured_s) for check in checks]
    assert slowdown(idle, waiting, longer) == pytest.approx(1.0, abs=0.03)


def test_slower_cores_leave_the_network_as_it_is():
    step, ranks = workload(0.2), cluster(1e8)
    slow_step, slow_ranks = slowed(step, 2.0), slowed(ranks, 2.0)
    assert slow_step.compute_s == pytest.approx(2 * step.compute_s) and slow_step.numel == step.numel
    assert [2 * gradient.ready_s for gradient in step.gradients] == [g.ready_s for g in slow_step.gradients]
    assert slow_ranks.network == ranks.network and slow_ranks.cores == ranks.cores
    assert slow_ranks.copy_s_per_byte == 2 * ranks.copy_s_per_byte
    assert slow_ranks.codec("int8").seconds("pack", 100) == 2 * ranks.codec("int8").seconds("pack", 100)
    assert slowed(ranks, 1.0) == ranks
    # All but the bytes' time: that of the first ones is hidden by the backward pass, which is longer now.
    as_before, slower = (
        predict_option(*pair, Way("int8"), 25).prediction for pair in ((step, ranks), (slow_step, slow_ranks))
    )
    assert as_before.network_s == pytest.approx(slower.network_s) and slower.step_s > as_before.step_s + 0.15
