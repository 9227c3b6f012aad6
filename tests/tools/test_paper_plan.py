"""``fusedcomm plan``: the model's predictions for clusters on paper, and what it refuses."""

import dataclasses
import json
from pathlib import Path

import pytest

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.tools import cost_model
from fusedcomm.tools.cli import main
from fusedcomm.tools.plan import command as plan_command
from fusedcomm.tools.plan import hardware as hardware_module
from fusedcomm.tools.plan import paper as paper_plan
from fusedcomm.tools.plan.architectures import architecture
from fusedcomm.tools.plan.costs import cluster_of
from fusedcomm.tools.plan.hardware import DEVICES, CpuHosts, GpuHosts, options_of
from fusedcomm.tools.plan.paper import Recommendation, Row, Training, even_parameters, plan, recommend

RESULTS = Path(__file__).parents[2] / "bench" / "results"
WIRES = ("bf16", "int8", "fp8", "int4")
FEW = ("--params", "1e6", "--step-ms", "100", "--wires", "bf16", "--caps", "25")


def rows_by_way(hardware: GpuHosts, numel: int = 10**8, step_s: float = 0.1) -> dict[str, Row]:
    rows = plan(hardware, Training(even_parameters(numel), step_s), WIRES, (5, 25, 100))
    return {row.way: row for row in rows}


def test_defaults_of_hardware_are_told():
    offered = plan_command._hardware_options()
    for hosts in DEVICES.values():
        for option, field in options_of(hosts):
            if option != "--ranks":
                told = plan_command._defaults_of(field.name)
                assert f"{field.default:g}" in told.strip(" ()").split(", ") and option in offered, option


# ---- architectures


@pytest.mark.parametrize(
    "name, numel, giga_multiply_adds",
    [
        ("resnet50", 25_557_032, 4.09),
        ("resnet101", 44_549_160, 7.80),
        ("resnet152", 60_192_808, 11.51),
        ("inception-v3", 23_834_568, 5.71),
        ("vgg16", 138_357_544, 15.47),
        ("bert-base", 109_482_240, None),
        ("bert-large", 335_141_888, None),
        ("gpt2", 124_439_808, None),
        ("gpt2-xl", 1_557_611_200, None),
    ],
)
def test_architectures_are_as_large_as_published(name, numel, giga_multiply_adds):
    found = architecture(name)
    assert found.numel == numel
    if giga_multiply_adds is not None:
        assert found.multiply_adds / 1e9 == pytest.approx(giga_multiply_adds, abs=0.01)


def test_most_of_vgg16_is_ready_at_once():
    """Its three linear layers have nine tenths of its parameters and hardly any compute."""
    workload = Training(architecture("vgg16").parameters, 0.3).workload()
    early = sum(gradient.numel for gradient in workload.gradients if gradient.ready_s < 0.02 * workload.backward_s)
    assert early / workload.numel == pytest.approx(0.894, abs=0.001)
    assert workload.gradients[-1].ready_s == pytest.approx(workload.backward_s)


def test_the_wire_decides_what_is_exempt():
    training = Training(architecture("resnet50").parameters, 0.1)
    exempt = {wire: sum(g.numel for g in training.workload(Config(wire=wire)).gradients if g.exempt) for wire in WIRES}
    assert exempt["bf16"] == 0
    assert exempt["int8"] == 2 * 26560 + 1000  # norms and the bias


# ---- latencies


def test_latencies_are_nccls_formulas():
    """4 hosts × 2 GPUs. Latencies are 10 µs between hosts, 1 µs within a host and 5 µs for a launch. Bytes take hardly
    any time."""
    hardware = GpuHosts(
        8, 2, nic_gbps=1e6, efficiency=1.0, local_gbps=1e6, nic_latency_us=10, local_latency_us=1, launch_us=5
    )
    for two_levels, exchange, gather in ((False, (5 + 10, 1), (5 + 30, 4)), (True, (5 + 10, 5 + 1), (5 + 30, 5 + 1))):
        found = cluster_of(hardware).two_levels if two_levels else cluster_of(hardware)
        for name, between, within in (
            ("all_reduce", 5 + 1.9 * 60, 1.9 * 8),
            ("tree", 5 + 2 * 2 * 10, 2 * 1),
            ("exchange", *exchange),
            ("gather", *gather),
        ):
            fixed = getattr(found.network, name).fixed_s, getattr(found.local, name).fixed_s
            assert fixed == (pytest.approx(between * 1e-6, rel=1e-3), pytest.approx(within * 1e-6, rel=1e-2)), name


def test_on_one_host_the_launch_is_within_it():
    found = cluster_of(GpuHosts(4, 4, launch_us=5, local_latency_us=1, local_gbps=1e6))
    assert found.local.all_reduce.fixed_s == pytest.approx((5 + 2 * 3) * 1e-6)
    assert found.local.gather.fixed_s == pytest.approx((5 + 3) * 1e-6)


# ---- the codec


def test_stages_take_the_bytes_that_they_read_and_write():
    """At 1 GB/s and with no time for a launch, a stage takes 1 ns a byte. fp32 gradients have 4 bytes, bf16 codes 2."""
    for ranks in (2, 8):
        hardware = GpuHosts(ranks, 1, memory_gbytes_per_s=1.0, codec_share=1.0, kernel_us=0.0)
        codec = cluster_of(hardware).codec("bf16")
        for stage, nbytes in (("pack", 4 + 2), ("reduce", 2), ("unpack", 2 + 4), ("sum", ranks * 2 + 4)):
            assert codec.seconds(stage, 1000) == pytest.approx(1e-6 * nbytes), stage


# ---- plans


def test_two_levels_are_better_where_the_nic_is_the_bottleneck():
    rows = rows_by_way(GpuHosts(64, 8, nic_gbps=25, local_gbps=200))
    for wire in WIRES:
        flat, levels = rows[f"wire={wire}, hosts=None"], rows[f"wire={wire}"]
        assert levels.step_s < 0.75 * flat.step_s
        assert levels.sent_nbytes < flat.sent_nbytes / 3
    assert rows["wire=int8"].speedup > 2
    assert rows["DDP default"].bound == "network"
    assert '(ddp, "' in recommend(list(rows.values()), WIRES).line


def test_a_row_says_what_its_step_is_made_of():
    rows = rows_by_way(GpuHosts(8, nic_gbps=10), numel=10**7, step_s=0.05)
    default = rows["DDP default"]
    assert default.sent_nbytes == pytest.approx(2 * 7 / 8 * 4e7, rel=1e-6)
    assert rows["wire=bf16, sum=direct"].sent_nbytes == pytest.approx(default.sent_nbytes / 2, rel=1e-3)
    assert rows["wire=int8"].sent_nbytes == pytest.approx(default.sent_nbytes * (1 + 4 / 128) / 4, rel=0.01)
    for row in rows.values():
        assert row.efficiency == pytest.approx(0.05 / row.step_s)
        assert row.exposed_s == pytest.approx(row.step_s - 0.05)
        assert row.speedup == pytest.approx(default.step_s / row.step_s)
    assert rows["DDP, best cap"].step_s <= default.step_s


@pytest.mark.parametrize(
    ("hosts", "nic_gbps", "numel", "step_s", "bound"),
    # 4096 hosts for a small model: an all-to-all has more messages than a tree has hops.
    [(8, 400, 10**7, 2.0, "compute"), (4096, 400, 10**6, 0.002, "latency")],
)
def test_leave_it_off_where_bytes_do_not_matter(hosts, nic_gbps, numel, step_s, bound):
    rows = rows_by_way(GpuHosts(hosts, nic_gbps=nic_gbps), numel, step_s)
    assert rows["wire=int8"].bound == bound
    assert recommend(list(rows.values()), WIRES).line.startswith(f"leave it off: {bound}-bound")


def recommendation(accepted: tuple[str, ...] = WIRES, **step_s: float) -> Recommendation:
    default = Row("DDP default", None, None, 25, 1.0, 1.0, 0.5, 1, 0.5, 4, "network")
    others = []
    for wire, seconds in step_s.items():
        others.append(dataclasses.replace(default, way=wire, wire=wire, attach=f'"{wire}"', step_s=seconds))
    return recommend([default, default, *others], accepted)


def recommended(**step_s: float) -> str:
    found = recommendation(**step_s)
    assert found.faster is None
    return found.line


def test_the_most_exact_of_nearly_equal_ways_is_recommended():
    assert recommended(bf16=0.61, int8=0.60) == 'fusedcomm.attach(ddp, "bf16")'
    assert recommended(bf16=0.70, int8=0.60) == 'fusedcomm.attach(ddp, "int8")'
    assert recommended(int8=0.60, int4=0.56) == 'fusedcomm.attach(ddp, "int8")'
    assert recommended(int8=0.60, int4=0.50) == 'fusedcomm.attach(ddp, "int4")'
    assert recommended(int8=0.99, int4=0.93) == 'fusedcomm.attach(ddp, "int4")'
    assert recommended(int8=0.98).startswith("leave it off: network-bound, and the fastest way is 1.02 times")


def test_only_accepted_wires_are_recommended_and_a_faster_one_is_named():
    found = recommendation(("bf16", "int8"), bf16=0.61, int8=0.50, fp8=0.49, int4=0.30)
    assert found.line == 'fusedcomm.attach(ddp, "int8")' and found.faster.wire == "int4"
    assert recommendation(("bf16", "int8"), bf16=0.61, fp8=0.60).faster is None
    found = recommendation(("bf16",), bf16=0.99, int4=0.30)
    assert found.line.startswith("leave it off: network-bound") and found.faster.wire == "int4"
    found = recommendation((), bf16=0.5)
    assert found.line == "leave it off: no fusedcomm wire was accepted" and found.faster.wire == "bf16"


# ---- the command


def test_the_answer_comes_first_and_the_assumptions_last(capsys, tmp_path):
    argv = ["--ranks", "16", "--gpus-per-host", "4", "--nic-gbps", "10", "--model", "resnet50"]
    path = tmp_path / "plan.json"
    assert main(["plan", *argv, "--samples-per-s", "400", "--batch", "64", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads(path.read_text())
    assert lines[0] == f"Use: {written['recommendation']}" and written["accepted"] == ["bf16", "int8"]
    assert lines[0].startswith('Use: fusedcomm.attach(ddp, "int8")')
    used = next(row for row in written["rows"] if row["way"] == "wire=int8")
    default = written["rows"][0]
    assert lines[1].startswith(
        f"  A step would take {used['step_s'] * 1e3:.1f} ms instead of {default['step_s'] * 1e3:.1f} ms, "
        f"{used['speedup']:.2f} times as fast: predicted"
    )
    faster = written["faster_but_not_accepted"]
    assert faster["wire"] == "int4" and faster["way"] in lines[2] and lines[2].endswith("then --accept int4")
    (begin,) = (index for index, line in enumerate(lines) if line.startswith("Assumed"))
    assumed = [line.strip().split(": ", 1) for line in lines[begin + 1 : -1]]
    assert dict(assumed) == written["assumptions"]
    assert lines[-1] == f"Written: {path}"
    assert "160 ms" in written["assumptions"]["compute"]
    assert written["hardware"]["ranks_per_host"] == 4
    assert [row["way"] for row in written["rows"]][:3] == ["DDP default", "DDP, best cap", "wire=bf16, hosts=None"]
    assert {field.name for field in dataclasses.fields(Row)} == set(written["rows"][0])
    # The table marks what is recommended, and what is not because it was not accepted.
    for row in written["rows"]:
        (line,) = (line for line in lines if line.startswith(f"{row['way']}  "))
        assert line.endswith("<- use") == (row == used)
        assert line.endswith("not accepted") == (row["wire"] in ("fp8", "int4"))


@pytest.mark.parametrize(
    ("module", "name", "value", "said"),
    [
        (hardware_module, "TREE_PIECE_NBYTES", 77 << 10, "pieces of 77 KiB"),
        (hardware_module, "TREE_RATE", 0.77, "0.77 of a ring's rate"),
        (hardware_module, "RING_PLATEAU", 7.7, "7.7 × these latencies"),
        (hardware_module, "MESSAGES_UNDER_WAY", 77, "77 messages"),
        (paper_plan, "WORTH_INT4", 0.77, "int4 only if nothing else does, or it is faster by more than 77%"),
        (paper_plan, "WORTHWHILE", 0.077, "shorter by more than 8%"),
        (cost_model, "FIRST_BUCKET_NBYTES", 7 << 20, "a first one of 7 MiB"),
        (cost_model, "DEFAULT_CAP_NBYTES", 77 << 20, "DDP's own, 77"),
        (chunks, "_DEVICE_NBYTES", 7 << 20, "of 7 MiB, 4 in flight"),
    ],
)
def test_every_constant_of_the_model_is_said(module, name, value, said, monkeypatch):
    """The assumptions name each constant that is not an option but changes a prediction or a recommendation."""
    hardware = GpuHosts(16, ranks_per_host=4)
    monkeypatch.setattr(module, name, value)
    assert said in " ".join((hardware.assumptions() | paper_plan.assumptions_of_ways(hardware)).values())


@pytest.mark.parametrize("device", DEVICES)
def test_every_hardware_option_reaches_the_model(capsys, tmp_path, device):
    path = tmp_path / "plan.json"
    given = {
        "ranks": 12,
        "ranks_per_host": 3,
        "nic_gbps": 7.0,
        "efficiency": 0.5,
        "nic_latency_us": 3.0,
        "local_gbps": 11.0,
        "local_latency_us": 2.0,
        "memory_gbytes_per_s": 100.0,
    }
    given |= {"slowdown": 0.0} if device == "gpu" else {"cores": 3.0, "tcp_ns_per_byte": 2.0, "codec_ns": 4.0}
    options = [text for name, value in given.items() for text in ("--" + name.replace("_", "-"), str(value))]
    assert main(["plan", "--device", device, *options, *FEW, "--json", str(path)]) == 0
    hardware = json.loads(path.read_text())["hardware"]
    assert {name: hardware[name] for name in given} == given and hardware["device"] == device
    assert set(given) == {field.name for _, field in options_of(DEVICES[device])}


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({"tcp_ns_per_byte": 50.0}, "DDP default"),
        ({"codec_ns": 100.0}, "wire=int8"),
        ({"cores": 0.05}, "DDP default"),
        ({"nic_latency_us": 1e5}, "wire=int8"),
        ({"memory_gbytes_per_s": 0.1}, "DDP default"),
    ],
)
def test_every_cost_of_a_cpu_host_makes_a_step_longer(changes, way):
    base = CpuHosts(4, nic_gbps=1)
    training = Training(even_parameters(10**7), 0.1)
    with_and_without = []
    for hosts in (base, dataclasses.replace(base, **changes)):
        rows = plan(hosts, training, ("int8",), (25,))
        with_and_without.append(next(row.step_s for row in rows if row.way == way))
    assert with_and_without[1] > 1.2 * with_and_without[0]


@pytest.mark.parametrize("num_hosts", [2, 4])
@pytest.mark.parametrize(("link", "nic_gbps"), [("100mbit", 0.1), ("1gbit", 1.0)])
def test_plans_for_cpu_hosts_agree_with_measured_steps(num_hosts, link, nic_gbps):
    """The hosts of bench/ddp_step.py share two cores, and compute for a small part of a step. Nothing here is fitted to
    these steps. Four hosts share caches and memory, too, which the plan does not know."""
    document = json.loads((RESULTS / f"ddp-step-{num_hosts}-hosts-{link}.json").read_text())
    measured = {row["impl"]: row for row in document["rows"] if row["case"] == f"transformer/{link}"}
    default = measured["ddp default"]
    hosts = CpuHosts(num_hosts, nic_gbps=nic_gbps, cores=2 / num_hosts)
    training = Training(even_parameters(default["numel"]), measured["compute alone"]["median_s"])
    rows = {row.way: row for row in plan(hosts, training, ("bf16", "int8", "int4"), (25,))}
    tolerance = 0.1 if num_hosts == 2 else 0.2
    for impl, way in {"ddp default": "DDP default", **{f"fusedcomm {w}": f"wire={w}" for w in WIRES}}.items():
        if impl in measured and way in rows:
            assert rows[way].step_s == pytest.approx(measured[impl]["median_s"], rel=tolerance), impl


def test_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main(["plan", "--ranks", "8", *FEW, "--plot", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Written: {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_names_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["plan", "--ranks", "8", *FEW, "--plot", str(tmp_path / "plan.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err
