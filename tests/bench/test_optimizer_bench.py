"""bench/optimizer.py: the tables of its results, its check of bytes, and its Muon."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(bench_modules):
    import optimizer

    return optimizer


def trained(way: str, seed: int, loss: float, sent_nbytes: int = 1_000_000) -> dict:
    found = {"model": "perceptron", "optimizer": "adamw", "way": way, "seed": seed, "loss": loss}
    return {**found, "sent_nbytes": sent_nbytes, "state_nbytes": 1 << 20, "bit_equal": not way.endswith("bf16")}


def stepped(way: str, step_s: list[float], **others: object) -> dict:
    found = {
        "optimizer": "muon",
        "way": way,
        "step_s": step_s,
        "cores_s": step_s[:1],
        "tx_nbytes": 2_000_000,
        "away_nbytes": 1_500_000,
    }
    return {**found, "sent_nbytes": None, "state_nbytes": 3 << 20, **others}


def test_losses_are_compared_with_the_replicated_ones_of_the_same_wire_and_seed(bench, capsys):
    rows = [trained("int8 replicated", 0, 2.5), trained("int8 replicated", 1, 2.0)]
    rows += [trained("int8 update bf16", 0, 2.25), trained("int8 update bf16", 1, 2.5, sent_nbytes=500_000)]
    bench.print_losses(rows)
    _, columns, replicated, bf16 = capsys.readouterr().out.splitlines()
    assert columns.split()[:2] == ["model", "way"]
    assert replicated.split()[4:] == ["2.2500", "yes", "1.000", "1.00", "seeds", "2.0000", "to", "2.5000"]
    assert bf16.split()[5:] == ["2.3750", "no", "1.000", "1.00", "-0.25000", "+0.50000"]


def test_steps_are_compared_with_the_first_way_of_the_same_optimizer(bench, capsys):
    rows = [stepped("replicated int8", [0.5, 0.25, 0.75]), stepped("sharded", [0.25, 0.25, 0.25], sent_nbytes=10_000)]
    rows.append(stepped("replicated int8", [1.0, 1.0, 1.0], optimizer="adamw", tx_nbytes=None, away_nbytes=None))
    bench.print_speed("1gbit", rows)
    _, link, _, first, sharded, other = capsys.readouterr().out.splitlines()
    assert link == "1gbit"
    assert first.split()[3:] == ["500.0", "1.000", "1.000", "1.000", "500.0", "2.00", "1.50", "–", "3.00"]
    assert sharded.split()[2:] == ["250.0", "0.500", "0.333", "1.000", "250.0", "2.00", "1.50", "0.01", "3.00"]
    assert other.split()[3:] == ["1000.0", "1.000", "1.000", "1.000", "1000.0", "–", "–", "–", "3.00"]


def test_other_bytes_than_the_two_shots_are_an_error(bench):
    rows = [trained("int8 replicated", 0, 2.5), trained("int8 update int8", 0, 2.5, sent_nbytes=1_009_000)]
    bench.check_bytes(rows)
    assert rows[1]["bytes_ratio"] == 1.009
    rows[1]["sent_nbytes"] = 1_011_000
    with pytest.raises(RuntimeError, match="int8 update int8: sends 1011000 bytes, the two-shot 1000000"):
        bench.check_bytes(rows)


@pytest.mark.parametrize("shape", [(24, 8), (8, 24)])
def test_its_muon_does_what_torchs_does_but_for_the_rounding_to_bf16(bench_modules, shape):
    from _optimizer_ways import Float32Muon

    generator = torch.Generator().manual_seed(0)
    begin, gradients = torch.randn(shape, generator=generator), torch.randn(3, *shape, generator=generator)
    results = []
    for kind in (torch.optim.Muon, Float32Muon):
        p = torch.nn.Parameter(begin.clone())
        optimizer = kind([p], lr=0.02)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        results.append(p.detach() - begin)
    torchs, ours = results
    assert 0 < float((ours - torchs).norm() / torchs.norm()) < 0.02


@pytest.mark.full
def test_both_parts_check_and_measure_over_loopback(bench_modules, tmp_path):
    path = tmp_path / "optimizer.json"
    few = ["--optimizers", "adamw", "--models", "perceptron", "--wires", "int8", "--updates", "int8", "--steps", "2"]
    command = [sys.executable, str(BENCH / "optimizer.py"), "--quick", *few, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert [row["way"] for row in found["loss"]] == ["int8 replicated", "int8 update int8"]
    rows = {row["way"]: row for row in found["speed"]["loopback"]}
    assert len(rows) == 9
    whole, half = (rows[way]["state_nbytes"] for way in ("replicated int8", "sharded int8/int8"))
    assert abs(half / whole - 0.5) < 0.01
