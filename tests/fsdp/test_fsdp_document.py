"""The script in docs/fsdp.md runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from patience import HANG_S

ROOT = Path(__file__).resolve().parents[2]


def test_the_documents_script_runs_on_two_ranks(tmp_path):
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/fsdp.md").read_text(), re.DOTALL)
    path = tmp_path / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(path)]
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": python_path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stderr
    assert (
        run.stdout.count("reduce-scatters in int8 over 2 ranks") == 3
    )  # the report at attach, and the plan of each rank
