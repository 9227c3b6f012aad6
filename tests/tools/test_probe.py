"""``fusedcomm probe``: a whole probe on real ranks within a tiny budget, and the command."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from models import on_host
from patience import HANG_S, patient, slowness
from test_probe_workload import SCRIPT, script

from fusedcomm import chunks
from fusedcomm.config import Config
from fusedcomm.ranks import groups
from fusedcomm.tools import output
from fusedcomm.tools.errors import ProbeError
from fusedcomm.tools.probe import report
from fusedcomm.tools.probe.choices import OFF
from fusedcomm.tools.probe.local import _agreed_cores
from fusedcomm.tools.probe.network import BETWEEN, ON_TWO_LEVELS, WITHIN, measure_network
from fusedcomm.tools.probe.progress import STAGES
from fusedcomm.tools.probe.run import PARTS, Settings, agreed_task, probe
from fusedcomm.tools.probe.team import Team
from fusedcomm.tools.probe.traced import stage_points

pytestmark = pytest.mark.alone

TINY = Settings(params=300_000, seconds=2.0, wires=("bf16", "int8"), accept=("bf16",), caps_mb=(25.0,))


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
    # The allowance is for other programs on this machine.
    assert outcomes[0][0]["seconds"]["all"] < TINY.seconds + patient(15), outcomes[0][0]["seconds"]
    assert seconds < TINY.seconds + patient(30)


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
        # DDP's own all-reduce is kept unless the steps are apart, which depends on what else the machine does.
        best_s = measured_s[OFF] if recommendation["leave_off"] else min(measured_s.values())
        assert recommendation["step_s"] <= 1.05 * best_s
    assert document["environment"]["world_size"] == 2 and document["environment"]["device"] == "cpu"
    # Everything that decides is the same on every rank.
    for key in ("predictions", "recommendation", "crossover_bytes_s", "workload"):
        assert document[key] == json.loads(json.dumps(others[key])), key


def network_measured(rank, world_size, s_per_byte):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "time_link", lambda backend: s_per_byte)
        found = measure_network(Team(dist.group.WORLD, torch.device("cpu")), None, 2.0)
    return {kind: sorted({s.nbytes for s in found.samples if s.kind == kind}) for kind in ("exchange", "direct")}


@pytest.mark.parametrize("s_per_byte", [8e-8, 1e-11])
def test_messages_are_of_the_sizes_that_suit_the_link(ranks, s_per_byte):
    """Messages of 4 KiB are sent before the sizes are known. On a slow link the smallest of the sizes is 4 KiB, too."""
    of_all, *others = ranks.run(network_measured, s_per_byte, world_size=2)
    for kind in ("exchange", "direct"):
        # With two ranks an all-gather is an exchange of both ranks' chunks.
        num_chunks, sum = (2, "one-shot") if kind == "exchange" else (1, "direct")
        message = num_chunks * chunks.resolved(Config(sum=sum), 2, "cpu", s_per_byte).chunks.nbytes
        assert of_all[kind] == sorted({4 << 10, message // 16, message // 4, message}) and others[0] == of_all


def channels_kept(rank, world_size):
    made, make_channels = [], groups.make_channels

    def noted(*arguments):
        channels = make_channels(*arguments)
        made.append(weakref.ref(channels))
        return channels

    def seconds(team, function, rounds, warmup):
        kept.append(made[0]() is not None)
        raise ProbeError("enough")

    kept = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "make_channels", noted)
        patch.setattr(Team, "time", seconds)
        with pytest.raises(ProbeError, match="enough"):
            measure_network(Team(dist.group.WORLD, torch.device("cpu")), None, 0.5)
    return kept


def test_channels_are_kept_while_others_connect_them(ranks):
    """Two ranks sum in one shot and need only one of the two channels. Dropping the other looks like a crash to a rank
    that still connects it."""
    assert ranks.run(channels_kept, world_size=2) == [[True]] * 2


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
    assert set(document["local"]["codecs"]) == {"fp32", "int8", "bf16"}  # bf16 is the wire within a host
    assert set(document["crossover_bytes_s"]) == {"int8", "int8 by host"}
    assert {row["hosts"] for row in document["check"]} >= {None}
    for part in ("all-to-all between hosts", "all-to-all within a host", "MB/s a host", "sent by a host"):
        assert part in text
    assert "fewer cores than ranks" in text


@pytest.mark.full
def test_hosts_with_different_numbers_of_ranks_have_no_sums_on_two_levels(ranks):
    settings = dataclasses.replace(TINY, wires=("bf16",), cores=1.0)
    (document, text, names), *_ = ranks.run(run_probe_on_hosts, settings, ["a", "a", "b"], world_size=3)
    assert names == [OFF, "bf16", "bf16 direct"] and document["network"]["two_levels"] is None
    assert "host a has 2 ranks, host b 1" in text and "MB/s a rank" in text and "fewer cores" not in text


def test_the_text_says_what_to_do(probed):
    (_, text, _), _ = probed[0]
    assert "Recommended: ddp = " in text or "Leave it off: " in text
    for part in ("Confidence: ", "predicted", "checked against real steps:", "all-to-all", "bf16 direct"):
        assert part in text


def seconds_of_backward(rank, world_size, settings):
    team = Team(dist.group.WORLD, torch.device("cpu"))
    task = agreed_task(team, settings, None)
    model, step, _ = task
    seconds = []
    for _ in range(7):
        loss = step(model)
        team.barrier()
        began = time.perf_counter()
        loss.backward()
        seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return min(team.slowest(seconds)), model.num_repeats


@pytest.mark.parametrize("params", [300_000, 5_000_000])
def test_a_backward_pass_takes_as_long_as_it_should(ranks, params):
    """The time includes that of writing gradients, and all ranks do as much work."""
    settings = dataclasses.replace(TINY, params=params, backward_s=0.2)
    tried = []
    while len(tried) < 3:  # the load of the machine may change after a pass has been tuned
        (taken_s, repeats), (_, others) = ranks.run(seconds_of_backward, settings, world_size=2)
        assert repeats == others > 0
        tried.append(taken_s)
        if 0.2 / 1.5 / slowness() < taken_s < 0.2 * 1.5 * slowness():
            return
    raise AssertionError(f"a backward pass of 0.2 s took {tried} s")


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


def other_settings(rank, world_size):
    settings = dataclasses.replace(TINY, seconds=TINY.seconds + rank, script=f"{rank}.py", cores=rank + 1)
    try:
        probe(settings, dist.group.WORLD, torch.device("cpu"))
    except ProbeError as error:
        return str(error)


def test_ranks_with_other_command_lines_are_named(ranks):
    wanted = (
        f"the ranks' command lines differ: --seconds is {TINY.seconds} on rank 0 and {TINY.seconds + 1} on rank 1; "
    )
    assert ranks.run(other_settings, world_size=2) == [wanted + "give every host the same"] * 2


def cores_agreed_on(rank, world_size, of_ranks):
    return _agreed_cores(Team(dist.group.WORLD, torch.device("cpu")), of_ranks[rank])


def test_ranks_agree_on_the_fewest_cores_whoever_was_told_of_them(ranks):
    counted, *_ = ranks.run(cores_agreed_on, [None, None], world_size=2)
    assert counted == len(os.sched_getaffinity(0)) / 2
    for of_ranks in ([0.25, None], [None, 0.25], [0.5, 0.25]):
        assert ranks.run(cores_agreed_on, of_ranks, world_size=2) == [0.25] * 2


def traced(rank, world_size):
    team = Team(dist.group.WORLD, torch.device("cpu"))
    return [stage_points(team, wire) for wire in ("int8", "fp32", "bf16")]


@pytest.mark.full
def test_stages_from_traces(ranks):
    """As on an accelerator, where stages cannot be called one by one."""
    of_three, of_two = (ranks.run(traced, world_size=p)[0] for p in (3, 2))
    two_shot = ["pack", "reduce", "unpack"]
    assert [list(points) for points in of_three] == [two_shot, ["pack"], two_shot]
    # Two ranks sum in one shot. A 16-bit wire can be summed directly, too, and then unpack sums nothing.
    assert [list(points) for points in of_two] == [["pack", "sum"], ["pack"], ["pack", "sum", "unpack"]]
    for points in (points for of_wire in (*of_three, *of_two) for points in of_wire.values()):
        assert all(numel > 10_000 and 1e-6 < seconds < 1 for numel, seconds in points)


# ---- the command


def run_command(tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    files = ("--json", str(tmp_path / "new" / "p.json"), "--plot", str(tmp_path / "p.png"))
    command = [sys.executable, "-m", "fusedcomm", "probe", *files, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, env=environment)


def test_the_command_without_torchrun(tmp_path):
    """Also with a script and a picture."""
    pytest.importorskip("matplotlib")
    done = run_command(tmp_path, "--seconds", "5", "--wires", "bf16", "--script", script(tmp_path, SCRIPT))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 ranks on this machine's loopback" in done.stdout and "torchrun" in done.stdout
    document = json.loads((tmp_path / "new" / "p.json").read_text())
    assert document["workload"]["numel"] == 64 * 256 + 256 + 256 * 10 + 10
    assert document["workload"]["optimizer_s"] > 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    files = tmp_path / "new" / "p.json", tmp_path / "p.png"
    assert done.stdout.splitlines()[-2:] == [f"Written: {path}" for path in files]
    # The advice comes before everything that was measured, and each stage was shown.
    heads = re.findall(r"^(Recommended|Leave it off|Confidence|choice|Details)\b", done.stdout, re.M)
    assert heads[0] in ("Recommended", "Leave it off") and heads[1:] == ["Confidence", "choice", "Details"]
    first, *stages = (line for line in done.stderr.splitlines() if re.match(r"about \d+ s: | *\d+ of \d+ s: ", line))
    assert re.fullmatch(r"about \d+ s: starting took \d+ s, measuring takes \d s", first)
    assert [line.split(": ")[1] for line in stages] == [STAGES[part] for part, _ in PARTS[:-1]]


STEP_THAT_FAILS = """
import torch
import torch.distributed as dist
def make():
    model = torch.nn.Linear(64, 64)
    batches = iter([torch.randn(8, 64)] * (9 if dist.get_rank() == 0 else 10**6))
    def step(model):
        batch = next(batches)
        return model(batch).sum()
    return model, step
"""


def test_a_step_that_fails_later_is_named_with_its_line(tmp_path):
    """The tenth step has no data, on one rank only. The other one does not wait for it."""
    done = run_command(tmp_path, "--script", script(tmp_path, STEP_THAT_FAILS))
    assert done.returncode == 2, done.stderr
    path = tmp_path / "model.py"
    assert f"fusedcomm probe: on rank 0: --script {path}: {path}, line 8, in step: batch = next(" in done.stderr
    assert "StopIteration" in done.stderr and "Traceback" not in done.stderr


def test_what_is_wrong_with_a_script_is_said_once(tmp_path):
    done = run_command(tmp_path, "--script", script(tmp_path, "make = 3"))
    assert done.returncode == 2 and done.stderr.count("has no function make()") == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_no_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="matplotlib, which is not installed: pip install matplotlib"):
        output.pyplot()
