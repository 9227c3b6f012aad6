"""torch's own tests of Join around DistributedDataParallel, with fusedcomm attached: those that run on CPUs."""

import pytest
import torch
import torchs_ddp_tests
from sampling import few
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
import fusedcomm.attaching  # before torch's class is replaced
from fusedcomm import version

NAMES = [
    "test_ddp_grad_div_uneven_inputs",
    "test_ddp_uneven_inputs",
    "test_ddp_uneven_input_exception",
    "test_ddp_uneven_input_join_disable",
    "test_ddp_join_model_equivalence",
]


def attached() -> type:
    class Attached(DistributedDataParallel):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.comm = fusedcomm.attach(self, "fp32", quiet=True)

    return Attached


def passed(rank, world_size, name):
    return torchs_ddp_tests.run(rank, world_size, name, attached)


@pytest.mark.skipif(version.minor(torch.__version__) != "2.13", reason="the names are of torch 2.13")
@pytest.mark.parametrize("name", few(NAMES, NAMES[0]))
def test_torchs_test_passes(ranks, name):
    assert ranks.run(passed, name, world_size=2) == ["passed"] * 2
