"""Everything but pictures works where only torch is installed: numpy is no requirement of torch's. A whole probe
without it: tests/test_readme_commands.py; the compiler of kernels: tests/kernels/test_kernel_code.py."""

import pytest
from scripts import printed_by_two_ranks

pytestmark = pytest.mark.check

SCRIPT = """
import sys
sys.modules["numpy"] = None  # importing it fails as if it were not installed
import warnings
warnings.simplefilter("ignore")  # torch warns that it has no numpy
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import fusedcomm
from fusedcomm.tools.probe.team import Team

rank, store = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=int(rank), world_size=2)

def train(ddp):
    for _ in range(3):
        ddp(torch.ones(2, 300)).sum().backward()

config = fusedcomm.Config(
    "int8", sum="two-shot", feedback=fusedcomm.Feedback(), hosts=2,
)
ddp = DistributedDataParallel(torch.nn.Linear(300, 300))
with fusedcomm.attach(ddp, config) as comm:
    with comm.trace(f"{store}-trace.json"):
        train(ddp)
    comm.load_state_dict(comm.state_dict(consolidated=True))
    assert comm.stats().steps == 3 and comm.nonfinite_report() == [] and str(comm.plan())
with fusedcomm.attach(ddp, "auto") as comm:
    train(ddp)
registered = DistributedDataParallel(torch.nn.Linear(300, 300))
registered.register_comm_hook(fusedcomm.CommState(config), fusedcomm.comm_hook)
train(registered)
fusedcomm.simulate([torch.ones(5000), torch.zeros(5000)], fusedcomm.Config("int4", "two-shot"))
team = Team(dist.group.WORLD, torch.device("cpu"))
value = (team.rank, "x" * 1000 * team.rank, {"a": [None, 0.1]})
print(team.gather(value) == [(0, "", {"a": [None, 0.1]}), (1, "x" * 1000, {"a": [None, 0.1]})], flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.full
def test_training_and_the_ranks_of_the_probe_need_no_numpy(tmp_path):
    assert printed_by_two_ranks(SCRIPT, tmp_path) == ["True\n", "True\n"]
