"""The scripts in docs/integrations.md run on two ranks."""

import re

import pytest
from sampling import few
from scripts import ROOT, torchrun
from test_trainers import need_trainer

SCRIPTS = {
    match.group(1): match.group(0)
    for script in re.findall(r"```python\n(import .*?)```", (ROOT / "docs/integrations.md").read_text(), re.DOTALL)
    if (match := re.search(r"(?s).*?(lightning\.pytorch|lightning\.fabric|accelerate|transformers).*", script))
}


def test_each_trainer_has_a_script():
    assert sorted(SCRIPTS) == ["accelerate", "lightning.fabric", "lightning.pytorch", "transformers"]


@pytest.mark.parametrize("trainer", few(SCRIPTS, "accelerate"))
def test_a_script_runs(tmp_path, monkeypatch, trainer):
    need_trainer(trainer.split(".")[0])
    monkeypatch.delenv("FUSEDCOMM_QUIET", raising=False)
    path = tmp_path / "script.py"
    path.write_text(SCRIPTS[trainer])
    run = torchrun(path, cwd=tmp_path)
    assert "wire int8" in run.stdout + run.stderr
