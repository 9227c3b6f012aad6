"""bench/step.py: a small run checks every way and reports what it measured; traffic is what the passes add up to."""

import json
import subprocess
import sys

import pytest
import torch
from patience import HANG_S
from test_hosts import BENCH  # first: it adds bench/ to sys.path

import _step_rank  # isort: skip
import _step_ways  # isort: skip
import step  # isort: skip
from lib.common import Row  # isort: skip

WAYS = {way.name: way for way in _step_ways.ways()}


def run_step(tmp_path, *arguments: str) -> dict:
    path = tmp_path / "step.json"
    command = [sys.executable, str(BENCH / "step.py"), "--quick", "--layers", "1", "--json", str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text())


AMP = ["--no-memory", "--amp", "--fused", "--optimizer", "momentum"]


@pytest.mark.full
@pytest.mark.parametrize("options", [["--no-memory"], AMP])
def test_every_way_is_checked_and_timed(tmp_path, options):
    rows = {row["impl"]: row for row in run_step(tmp_path, *options)["rows"]}
    assert set(rows) == {way.name for way in _step_ways.ways(fused="--fused" in options)}
    for name, row in rows.items():
        figures = row["figures"]
        assert row["checked"] and row["numel"] == rows["ddp"]["numel"] > 0
        parts = [figures[f"{part}_s"] for part in ("forward", "backward", "after")]
        assert min(parts) > 0 and max(parts) < row["percentiles_s"]["p95"]
        assert ("ddp, torch's bf16 hook" in row["ratios"]) == (name != "ddp, torch's bf16 hook")


@pytest.mark.full
def test_peaks_of_memory_are_measured_beside_ddps(tmp_path):
    document = run_step(tmp_path, "--rounds", "1", "--width", "512", "--ways", "ddp", "fusedcomm reducer, bf16")
    ddp, reducer = document["rows"]
    gradients_nbytes = 4 * ddp["numel"]
    # Each process holds at least weights, gradients and AdamW's two moments.
    assert min(row["figures"]["peak_nbytes"] for row in (ddp, reducer)) > 4 * gradients_nbytes
    assert ddp["figures"]["below_ddp_of_gradients"] == 0
    below = ddp["figures"]["peak_nbytes"] - reducer["figures"]["peak_nbytes"]
    assert reducer["figures"]["below_ddp_of_gradients"] == pytest.approx(below / gradients_nbytes)


class Sums(torch.nn.Module):
    """Weights whose gradients are given, as if they had been synchronized."""

    def __init__(self, means: list[torch.Tensor]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros_like(mean) for mean in means)
        self.means = means

    def forward(self) -> torch.Tensor:
        return sum((weight * mean).sum() for weight, mean in zip(self.weights, self.means, strict=True))


class TwoRanks:
    """Inputs of two ranks that are known."""

    def of_both(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(7)
        return [tuple(torch.randn(2, size, generator=generator)) for size in (5, 300)]


class Front:
    """Clips as torch does."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters = parameters

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters, max_norm)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("ddp", lambda mean: mean, None),
        ("ddp", lambda mean: mean * (1 + 2**-23), "wrong elements in the mean of parameter 0"),
        ("fusedcomm reducer, bf16", lambda mean: mean * (1 + 2**-12), None),
        ("fusedcomm reducer, bf16", lambda mean: mean * 1.01, "wrong elements in the mean of parameter"),
        ("fusedcomm hook, bf16", lambda mean: mean.roll(1), "wrong elements in the mean of parameter 0"),
    ],
)
def test_the_check_refuses_a_wrong_mean(monkeypatch, name, change, says):
    inputs = TwoRanks()
    means = [change(first * 0.5 + second * 0.5) for first, second in inputs.of_both()]
    runner = object.__new__(_step_rank.Runner)
    runner.way, runner.module, runner.scaler = WAYS[name], Sums(means), None
    runner.parameters = list(runner.module.parameters())
    runner.front = Front(runner.parameters)
    runner.optimizer = torch.optim.SGD(runner.parameters, 0.1)
    monkeypatch.setattr(_step_rank.dist, "get_rank", lambda: 0)
    if says is None:
        runner.check(inputs)
        return
    with pytest.raises(RuntimeError, match=says):
        runner.check(inputs)


def test_what_is_printed_has_ratios_to_torchs_hook(capsys):
    def row(impl, median_s, **figures):
        parts = {"forward_s": 0.1, "backward_s": median_s / 2, "after_s": 0.2}
        return Row("step/x", impl, 10, 40, median_s, median_s, True, figures={**parts, **figures})

    step.print_steps([row("ddp, torch's bf16 hook", 1.0), row("ours", 0.8, peak_nbytes=3 << 20)])
    _, _, _, torchs, ours = capsys.readouterr().out.splitlines()
    assert torchs.split()[-2:] == ["1000.0", "(1.000)"]
    assert ours.split() == ["ours", "100.0", "(1.000)", "400.0", "(0.800)", "200.0", "(1.000)", "800.0", "(0.800)", "3"]
