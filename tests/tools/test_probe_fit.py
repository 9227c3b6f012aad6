"""How the probe evaluates its measurements: lines through times, the core time of bytes, the speed of the cores."""

import dataclasses
import random

import pytest
from test_probe_choices import cluster, workload

from fusedcomm.tools.cluster import Cost, Network, TwoLevels
from fusedcomm.tools.probe import fit
from fusedcomm.tools.probe.check import Check
from fusedcomm.tools.probe.choices import OFF, Way, predict_option
from fusedcomm.tools.probe.network import BETWEEN, Sample, with_cpu_of_messages
from fusedcomm.tools.probe.network import fit as fit_network
from fusedcomm.tools.probe.speed import Speed, slowed, speed_of
from fusedcomm.tools.probe.steps import CpuOfSteps, attributed


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
        cpu_s = 3 * 20 * (1e-4 + nbytes / 2 * 1e-9)  # of a rank that sends half: a sample counts its host's bytes
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


# ---- the core time of bytes


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
    # Costs are trusted only within a factor of 3 of what they were alone.
    wild = attributed(plain, numel, cpu_of_steps(-1.0, {"exchange": 1.0, "direct": -1.0, "all_reduce": 1.0}))
    assert wild.network.exchange.cpu_s_per_unit == wild.network.all_reduce.cpu_s_per_unit == pytest.approx(1.5e-9)
    assert wild.network.direct.cpu_s_per_unit == pytest.approx(5e-10 / 3) and wild.copy_s_per_byte == 3e-10


# ---- the speed of the cores


def steps_at(speed, step, ranks, names=(OFF, "bf16", "int8")):
    """Checks with the step times that are predicted at this speed."""
    checks = []
    for way in map(Way, names):
        taken = predict_option(*speed.of(step, ranks), way, 25).prediction.step_s
        checks.append(Check(predict_option(step, ranks, way, 25), step.numel, taken, [taken]))
    return checks


@pytest.mark.parametrize("factor", [0.85, 1.0, 1.2])
def test_real_steps_tell_how_fast_the_cores_are(factor):
    step, busy = workload(0.2), cluster(1e11, codec_s=1e-8)
    found = speed_of(step, busy, steps_at(Speed(factor), step, busy))
    assert found.cores == pytest.approx(factor, rel=0.03)
    assert found.collectives == pytest.approx({"all_reduce": 1.0, "exchange": 1.0, "direct": 1.0}, rel=0.1)


def on_few_cores(per_byte_s: float) -> tuple:
    """A step, and a cluster with fast links and one core, on which the core time of collectives matters."""
    costs = {kind: Cost(0.0, 1e-10, 0.0, per_byte_s) for kind in ("all_reduce", "exchange", "direct")}
    return workload(0.05), dataclasses.replace(cluster(1e11), network=Network(**costs), cores=1.0)


def test_real_steps_tell_what_each_kind_of_collective_takes_of_a_core():
    step, busy = on_few_cores(1e-9)
    checks = steps_at(Speed(1.0, {"all_reduce": 1.4, "exchange": 0.9}), step, busy)
    found = speed_of(step, busy, checks)
    # A part of the deviation may be explained by the speed of the cores.
    assert 1.15 < found.collectives["all_reduce"] < 1.45 and 0.8 < found.collectives["exchange"] < 1.05
    corrected = found.of(step, busy)
    assert min(check.ratio for check in checks) < 0.87
    for check in checks:
        predicted = predict_option(*corrected, check.option.way, 25).prediction
        assert predicted.step_s == pytest.approx(check.measured_s, rel=0.05)
    # A kind of collective without steps takes the factor of a kind that works alike, or has none.
    assert found.collectives["direct"] == found.collectives["all_reduce"]
    direct = corrected[1].network.direct.cpu_s_per_unit
    assert direct == pytest.approx(1e-9 * found.cores * found.collectives["all_reduce"])
    assert set(speed_of(step, busy, checks[1:]).collectives) == {"exchange"}


def test_steps_that_wait_for_the_network_tell_nothing_of_the_cores():
    waiting, idle = cluster(1e7), workload(1e-3)
    checks = steps_at(Speed(), idle, waiting)
    longer = [dataclasses.replace(check, measured_s=1.1 * check.measured_s) for check in checks]
    found = speed_of(idle, waiting, longer)
    assert found.cores == pytest.approx(1.0, abs=0.03) and set(found.collectives.values()) == {1.0}


def test_the_speed_of_a_collective_is_that_of_both_levels():
    step, ranks = on_few_cores(1e-9)
    ranks = dataclasses.replace(ranks, two_levels=TwoLevels(ranks.network, ranks.network))
    _, corrected = Speed(2.0, {"exchange": 1.5}).of(step, ranks)
    for network in (corrected.network, corrected.two_levels.network, corrected.two_levels.local):
        assert network.exchange.cpu_s_per_unit == pytest.approx(3e-9) and network.exchange.per_unit_s == 1e-10
        assert network.all_reduce.cpu_s_per_unit == pytest.approx(2e-9)


def test_slower_cores_leave_the_network_as_it_is():
    step, ranks = workload(0.2), cluster(1e8)
    slow_step, slow_ranks = slowed(step, 2.0), slowed(ranks, 2.0)
    assert slow_step.compute_s == pytest.approx(2 * step.compute_s) and slow_step.numel == step.numel
    assert [2 * gradient.ready_s for gradient in step.gradients] == [g.ready_s for g in slow_step.gradients]
    assert slow_ranks.network == ranks.network and slow_ranks.cores == ranks.cores
    assert slow_ranks.copy_s_per_byte == 2 * ranks.copy_s_per_byte
    assert slow_ranks.codec("int8").seconds("pack", 100) == 2 * ranks.codec("int8").seconds("pack", 100)
    assert slowed(ranks, 1.0) == ranks
    # Everything takes longer except the bytes. The longer backward pass hides the time of the first ones.
    as_before, slower = (
        predict_option(*pair, Way("int8"), 25).prediction for pair in ((step, ranks), (slow_step, slow_ranks))
    )
    assert as_before.network_s == pytest.approx(slower.network_s) and slower.step_s > as_before.step_s + 0.15
