"""A host that is cut off for good, without a word from its system: the others learn it in a known time."""

import subprocess
import sys

import pytest
from on_hosts import hosts, needs_hosts
from patience import patient

SCRIPT = """
import os, subprocess, time, torch
import fusedcomm.horovod as hvd
import fusedcomm.ranks.connections as connections
connections.KEEP_IDLE_S = connections.KEEP_INTERVAL_S = connections.KEEP_COUNT = 1
hvd.init()
rank = hvd.rank()
model = torch.nn.Linear(64, 64)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.01), model.named_parameters())
try:
    for step in range(10**9):
        if step == 10 and rank == 2:
            subprocess.run(["ip", "link", "set", os.environ["FUSEDCOMM_BENCH_INTERFACE"], "down"], check=True)
            time.sleep(10**6)
        optimizer.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        time.sleep(0.01)
except hvd.HorovodInternalError as error:
    print(error, flush=True)
    os._exit(3)
"""


@pytest.mark.full
@needs_hosts
def test_the_ranks_of_the_other_hosts_get_an_error(tmp_path):
    """Sent data that are not acknowledged keep TCP from probing: it would send them again for a quarter of an hour."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with hosts.make(3, "unlimited") as cluster:
        ranks = []
        for rank in range(3):
            variables = dict(RANK=rank, WORLD_SIZE=3, MASTER_ADDR=cluster.addresses[0], MASTER_PORT=29500)
            variables = [f"{name}={value}" for name, value in variables.items()]
            command = ["env", *variables, sys.executable, str(path)]
            ranks.append(cluster.start(rank, command, stdout=subprocess.PIPE, text=True))
        for rank in (0, 1):
            said, _ = ranks[rank].communicate(timeout=patient(90))
            assert ranks[rank].returncode == 3 and "rank 2 ended its connection" in said, said
