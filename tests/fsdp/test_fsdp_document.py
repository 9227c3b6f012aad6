"""The script in docs/fsdp.md runs."""

import re

import pytest
from scripts import ROOT, torchrun


@pytest.mark.full
def test_the_documents_script_runs_on_two_ranks(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/fsdp.md").read_text(), re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(script)
    # In the report at attach, and in the plan of each rank.
    assert torchrun(path).stdout.count("reduce-scatters in int8 over 2 ranks") == 3
