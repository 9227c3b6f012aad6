"""``fusedcomm plan``: bytes and times worked out by hand, beside measured steps, and what the command prints."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm.tools.cli import main
from fusedcomm.tools.plan.command import MODELS, params
from fusedcomm.tools.plan.paper import BUCKET_NBYTES, LINE_SHARE, Machines, Row, Step, added_s, answer, plan

RESULTS = Path(__file__).parents[2] / "bench" / "results"
WIRES = ("bf16", "int8", "int4")
BYTES_OF = {"bf16": 2, "int8": 1 + 4 / 128}
NUMEL = 10 * BUCKET_NBYTES // 4
STEP = Step(NUMEL, 0.3, 2 / 3)
COMMAND = ("plan", "--params", "350M", "--hosts", "4", "--ranks-per-host", "2", "--nic-gbps", "25", "--step-ms", "300")


def rows_by_way(machines: Machines, step: Step = STEP, wires: tuple[str, ...] = WIRES) -> dict[str, Row]:
    return {row.way: row for row in plan(machines, step, wires)}


# ---- bytes


def test_bytes_of_hosts_with_one_rank_each():
    rows = rows_by_way(Machines(8, 1, 25, 200))
    assert list(rows)[:4] == ["off", "bf16 two-shot", "bf16 direct", "bf16 one-shot"]
    assert rows["off"].between_nbytes == 2 * 7 * 4 * NUMEL // 8
    for wire, nbytes in BYTES_OF.items():
        two_shot = rows[f"{wire} two-shot"].between_nbytes
        assert two_shot == pytest.approx(2 * 7 / 8 * nbytes * NUMEL, rel=0.01)
        assert rows[f"{wire} one-shot"].between_nbytes == pytest.approx(4 * two_shot, rel=0.01)
    assert rows["bf16 direct"].between_nbytes == pytest.approx(rows["off"].between_nbytes / 2, rel=0.01)
    assert not any(row.inside_nbytes or row.by_host for row in rows.values())


def test_bytes_of_hosts_with_several_ranks():
    """On one level each of four ranks sends half of a two-shot's bytes to the other host. By host their sum is sent."""
    rows = rows_by_way(Machines(2, 4, 25, 200))
    of_rank = 7 / 8 * BYTES_OF["int8"] * NUMEL * 2
    flat, levels = rows["int8 two-shot"], rows["int8 two-shot by host"]
    assert list(rows).index(levels.way) < list(rows).index(flat.way)
    assert flat.between_nbytes == pytest.approx(4 * of_rank * 4 / 7, rel=0.01)
    assert flat.inside_nbytes == pytest.approx(of_rank * 3 / 7, rel=0.01)
    assert levels.between_nbytes == pytest.approx(4 * 2 * BYTES_OF["int8"] * NUMEL / 4 / 2, rel=0.01)
    assert levels.inside_nbytes == pytest.approx(3 / 4 * (2 + BYTES_OF["int8"]) * NUMEL, rel=0.01)
    ring = 2 * 7 * 4 * NUMEL // 8
    assert (rows["off"].between_nbytes, rows["off"].inside_nbytes) == (ring, ring * 3 // 4)


def test_one_host_sends_nothing_to_others():
    rows = rows_by_way(Machines(1, 4, 25, 200))
    assert not any(row.between_nbytes or row.by_host for row in rows.values())
    assert rows["bf16 two-shot"].inside_nbytes == pytest.approx(2 * 3 / 4 * 2 * NUMEL, rel=0.01)


def sent_by_ddp(rank: int, world_size: int, wire: str) -> int:
    """Bytes that a rank sends of a model with 2**20 parameters, as DDP's handle counts them."""
    ddp = DistributedDataParallel(torch.nn.Linear(1 << 10, 1 << 10, bias=False))
    comm = fusedcomm.attach(ddp, wire, quiet=True)
    ddp(torch.randn(2, 1 << 10)).sum().backward()
    return comm.stats().sent_nbytes


@pytest.mark.parametrize("wire", WIRES)
def test_bytes_are_those_that_ddp_sends(ranks, wire):
    """But for the padding of chunks, whose size depends on the link."""
    row = plan(Machines(3, 1, 1, 1), Step(1 << 20, 0.1, 0.5), (wire,))[1]
    for sent in ranks.run(sent_by_ddp, wire, world_size=3):
        assert sent == pytest.approx(row.between_nbytes, rel=0.01)


# ---- times


def test_the_slower_line_counts():
    fast_inside, slow_inside = (rows_by_way(Machines(2, 4, 10, gbps))["int8 two-shot by host"] for gbps in (1e6, 0.1))
    assert fast_inside.line_s == pytest.approx(8 * fast_inside.between_nbytes / (10e9 * LINE_SHARE))
    assert slow_inside.line_s == pytest.approx(8 * slow_inside.inside_nbytes / (0.1e9 * LINE_SHARE))


@pytest.mark.parametrize(
    ("line_s", "num_buckets", "added"),
    [
        (0.5, 10, 0.05),  # a twentieth of the backward pass for each bucket: only the last one is sent after its end
        (1.0, 10, 0.1),  # as long as the backward pass, and later by the first bucket
        (3.0, 10, 2.1),  # the line is busy from the first bucket on
        (0.5, 1, 0.5),  # one bucket hides nothing
    ],
)
def test_what_does_not_hide_is_added(line_s, num_buckets, added):
    assert added_s(line_s, 1.0, num_buckets) == pytest.approx(added)


def test_the_answer_names_the_first_that_hides():
    slow, fast = Machines(4, 1, 1, 200), Machines(4, 1, 400, 200)
    rows = plan(fast, STEP, WIRES)
    assert all(row.hides for row in rows if row.sum != "one-shot")
    assert answer(rows, STEP).startswith("Leave fusedcomm off")
    rows = plan(slow, STEP, WIRES)
    assert not any(row.hides for row in rows)
    assert "none hides" in answer(rows, STEP) and 'fusedcomm.attach(ddp, "int4")' in answer(rows, STEP)
    longer = dataclasses.replace(STEP, seconds=6.0)
    found = answer(plan(slow, longer, WIRES), longer)
    assert found.startswith("DDP's own all-reduce adds ") and "a step of 6000 ms" in found
    assert found.endswith('the first that hides: bf16 two-shot, fusedcomm.attach(ddp, "bf16")')


@pytest.mark.parametrize("num_hosts", [2, 4])
def test_steps_that_are_all_line_agree_with_measured_ones(num_hosts):
    """The hosts of bench/ddp_step.py on a line of 100 Mbit/s compute for a hundredth of a step."""
    document = json.loads((RESULTS / f"ddp-step-{num_hosts}-hosts-100mbit.json").read_text())
    measured = {row["impl"]: row for row in document["rows"]}
    alone = measured["compute alone"]
    rows = plan(Machines(num_hosts, 1, 0.1, 1), Step(alone["numel"], alone["median_s"], 2 / 3), WIRES)
    first = {row.wire: row for row in reversed(rows)}
    for impl, wire in {"ddp default": "off", **{f"fusedcomm {wire}": wire for wire in WIRES}}.items():
        step_s = alone["median_s"] + first[wire].added_s
        assert 0.85 * measured[impl]["median_s"] <= step_s <= 1.02 * measured[impl]["median_s"], impl


# ---- the command


@pytest.mark.parametrize(
    ("text", "count"), [("350M", 350_000_000), ("1.5b", 1_500_000_000), ("25e6", 25_000_000), ("7", 7), *MODELS.items()]
)
def test_parameters_are_counts_with_units_and_models(text, count):
    assert params(text) == count


def test_the_answer_comes_first_and_every_row_is_written(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*COMMAND, "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    written = json.loads(path.read_text())
    assert lines[0].startswith("DDP's own all-reduce adds ") and lines[-1] == f"Written: {path}"
    assert lines[-2].startswith("Computed, not measured: 350,000,000 fp32 gradients in 53 equal buckets")
    assert "4 hosts × 2 ranks" in lines[-2]
    rows = [Row(**row) for row in written["rows"]]
    assert {row.wire for row in rows} == {"off", "fp32", "bf16", "fp16", "int8", "fp8", "int4"}
    for row in rows:
        (line,) = (line for line in lines[2:] if line.startswith(f"{row.way}  "))
        assert line.split()[-1] == "hides" if row.hides else f"{row.added_s * 1e3:.1f}" == line.split()[-1]
    code = next(row.code for row in rows if row.way == "int8 two-shot")
    assert code == 'fusedcomm.Config(wire="int8", hosts=None)'
    assert eval(code).hosts is None
