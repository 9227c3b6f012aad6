"""The probe's predictions for each way, and its recommendation."""

import dataclasses

import pytest
from test_cost_model import linear_gradients

from fusedcomm.tools.cluster import Cluster, Codec, Cost, Network, TwoLevels
from fusedcomm.tools.cost_model import Workload
from fusedcomm.tools.probe.choices import (
    FASTEST_BYTES_S,
    OFF,
    Way,
    at_rate,
    crossover_bytes_s,
    finalists,
    link_bytes_s,
    options,
    recommend,
)
from fusedcomm.tools.probe.network import MeasuredNetwork, Sample


def cluster(bytes_s: float, codec_s: float = 1e-10, world_size: int = 2) -> Cluster:
    """A cluster whose collectives are limited by their bytes."""
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
    assert found.option.code == 'ddp = DistributedDataParallel(model); comm = fusedcomm.attach(ddp, "int8")'
    assert "are spent waiting for gradients" in found.reason
    assert recommended(1e8, 0.0, accept=("int4",)).faster is None


def test_of_choices_that_are_as_fast_the_more_exact_is_recommended():
    # With either wire all buckets except the last are hidden.
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
    assert found.leave_off and "no fusedcomm wire was accepted" in found.reason and found.faster.wire == "int4"


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
        return recommend(found, accepted, {option: [steps_s.get(option.wire, 0.5)] * 4 for option in chosen})

    other = settled(bf16=0.3, off=0.6)
    assert other.option == bf16 and other.measured and (other.step_s, other.baseline_s, other.gain) == (0.3, 0.6, 0.5)
    assert "of 600.0 ms with DDP's own all-reduce" in other.reason and not predicted.measured
    # If wires differ only by noise, the more exact one is recommended.
    assert settled(bf16=0.5, off=0.6).option == bf16
    none = settled(off=0.4)
    assert none.leave_off and none.option == none.baseline and "off 400.0 ms" in none.reason


@pytest.mark.parametrize(
    ("off_s", "int8_s", "reason"),
    [
        ([1.0, 1.1, 1.0, 1.1], [0.7, 0.8, 0.7, 0.8], None),
        ([1.0, 1.1, 1.0, 1.1], [1.2, 1.3, 1.2, 1.3], "steps would be longer: int8 1250.0 ms, off 1050.0 ms"),
        ([1.0, 1.01, 1.0, 1.01], [0.99, 1.0, 0.99, 1.0], "too little would be saved: int8 995.0 ms, off 1005.0 ms"),
        ([1.0, 1.1, 1.0, 1.1], [1.0, 1.1, 1.0, 1.1], "too little would be saved: int8 1050.0 ms, off 1050.0 ms"),
        # A quarter of the steps with int8 are as long as most of the others.
        (
            [1.0, 1.1, 1.0, 1.1],
            [0.7, 0.8, 1.2, 0.7],
            "the measured steps do not show that anything is saved, because they overlap: int8 750.0 ms, off 1050.0 ms",
        ),
    ],
    ids=["faster", "slower", "hardly faster", "as fast", "noise"],
)
def test_what_real_steps_do_not_show_to_be_faster_is_not_recommended(off_s, int8_s, reason):
    off, int8 = options(workload(0.0), cluster(1e8), ("int8",), (25.0,))
    found = recommend([off, int8], ("int8",), {off: off_s, int8: int8_s})
    assert found.option == (int8 if reason is None else off) and (reason is None or found.reason == reason)


def test_other_buckets_of_ddp_have_to_be_shown_to_be_faster_too():
    usual, others = (options(workload(0.4), cluster(1e8), (), (cap,))[0] for cap in (25.0, 1.0))
    for others_s, option in (([0.7, 0.8, 0.7, 0.8], others), ([0.7, 0.8, 1.2, 0.7], usual)):
        assert recommend([usual, others], (), {usual: [1.0, 1.1, 1.0, 1.1], others: others_s}).option == option


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
    """The fit can give bytes too low a cost if messages are mostly other work. Then the rate that was seen counts."""
    seen = dataclasses.replace(cluster(2e8), link_bytes_s=1e8)
    assert (link_bytes_s(cluster(2e8)), link_bytes_s(seen)) == (2e8, 1e8)
    twice = at_rate(seen, 2e8)
    assert link_bytes_s(twice) == 2e8 and twice.network.exchange.per_unit_s == pytest.approx(1 / 4e8)
    assert at_rate(seen, 5e7).network.exchange.per_unit_s == pytest.approx(1 / 5e7)
    samples = [Sample("direct", 4096, n, 1, 4, [n / rate]) for n, rate in ((1000, 2e6), (9000, 5e6), (3000, 1e6))]
    found = MeasuredNetwork(seen.network, [*samples, Sample("direct", 4096, 1000, 1, 1, [1e-9])], None)
    assert found.carried_bytes_s("direct") == pytest.approx(5e6)


def test_the_crossover_is_the_same_whichever_link_was_measured():
    """On another link chunks have the sizes that attach would choose there, and each chunk has its cost."""

    def until(bytes_s: float) -> float:
        measured = dataclasses.replace(cluster(bytes_s, codec_s=2e-9), timed_s_per_byte=1 / bytes_s)
        return crossover_bytes_s(workload(0.0), measured, Way("int8"), 25.0)

    assert 1e8 < until(1e8) < FASTEST_BYTES_S
    assert [until(1e7), until(1e9)] == pytest.approx([until(1e8)] * 2, rel=0.02)


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
        # Bytes that leave a host for each element. A ring's bytes leave it once. In a two-shot, half of its two ranks'
        # messages stay on it.
        expected = {OFF: 6, "bf16": 4, "bf16 direct": 3, "bf16 by host": 2}
        assert {name: sent[name] for name in expected} == pytest.approx(expected, rel=0.01)
        recommendation = recommend(found, ("bf16", "int8"))
        assert (recommendation.option.name == "int8 by host") == wins
        one_level = f'(ddp, fusedcomm.Config(wire="{recommendation.option.wire}", hosts=None))'
        assert recommendation.option.code.endswith('(ddp, "int8")' if wins else one_level)


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


def test_no_step_waits_for_less_than_nothing():
    """A measured step can be shorter than its computation was alone."""
    found = options(workload(0.3), cluster(2e10), ("int8",), (25.0,))
    assert min(option.prediction.compute_s for option in found) == pytest.approx(0.3)
    decided = recommend(found, ("int8",), {option: [0.299] for option in found})
    assert decided.leave_off and "a step waits 0.0 ms of 299.0 ms" in decided.reason
    assert decided.reason.endswith("(int8 299.0 ms, off 299.0 ms)")
