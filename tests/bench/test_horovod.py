"""bench/horovod.py measures every part, with right results, and writes them down."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from patience import HANG_S

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.mark.full
def test_every_part_is_measured_over_loopback(tmp_path):
    path = tmp_path / "horovod.json"
    sizes = ["--quick", "--params", "1e5", "--batch", "1"]
    command = [sys.executable, str(BENCH / "horovod.py"), *sizes, "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["not_measured"] == [] and all(row["checked"] for row in found["rows"])
    steps = {row["impl"] for row in found["rows"] if "samples_s" in row["figures"]}
    assert steps >= {"ddp", "hvd none", "hvd bf16", "hvd int8", "fusedcomm hook bf16", "fusedcomm hook int8"}
    assert {row["impl"] for row in found["rows"]} >= {"dist.all_reduce", "hvd.allreduce_", "hvd.allreduce_async_"}
    idle = found["idle"]
    assert idle["num_own"] >= 1 and idle["coordinator_wakeups_s"] <= 1
