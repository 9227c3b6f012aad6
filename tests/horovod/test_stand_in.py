"""After install(), a script that imports horovod.torch gets ours. Nothing is put there before."""

import subprocess
import sys

import pytest
from jobs import clean_environment

SCRIPT = """
import os, sys, types
import fusedcomm.horovod as ours
assert not any(name.startswith("horovod") for name in sys.modules)
sys.modules["horovod"] = types.ModuleType("horovod")
try:
    ours.install()
    raise AssertionError("Horovod itself was replaced")
except RuntimeError as error:
    assert "import horovod" in str(error)
del sys.modules["horovod"]
ours.install()
ours.install()
import horovod
import horovod.torch as hvd
from horovod.torch.mpi_ops import allreduce_async_, synchronize, Average, HorovodInternalError, is_homogeneous
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object
from horovod.torch.optimizer import DistributedOptimizer
from horovod.torch.elastic import run
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.elastic.state import TorchState
from horovod.common.exceptions import HorovodInternalError as Error, HostsUpdatedInterrupt, HorovodVersionMismatchError
from horovod.common.util import env, extension_available, gloo_built, is_iterable, mpi_built, nccl_built, split_list
from horovod.common.process_sets import ProcessSet, global_process_set
import horovod.common.util as util
assert hvd is ours and horovod.torch is ours and Error is HorovodInternalError and horovod.common.util is util
assert hvd.install.__name__ == "install"
assert ElasticSampler is hvd.elastic.ElasticSampler and TorchState is hvd.elastic.TorchState
assert HostsUpdatedInterrupt(skip_sync=True).skip_sync and is_iterable("") and not is_iterable(1)
assert split_list([1, 2, 3], 2) == [[1, 2], [3]] and nccl_built() == bool(hvd.nccl_built())
everything = {}
exec("from horovod.torch import *", everything)
assert everything["allreduce"] is hvd.allreduce and everything["elastic"] is hvd.elastic
assert not {"state", "ops", "order", "types"} & set(everything)
assert extension_available("torch") and not extension_available("tensorflow")
assert gloo_built() and not mpi_built()
with env(SOME_VARIABLE="x"):
    assert os.environ["SOME_VARIABLE"] == "x"
assert "SOME_VARIABLE" not in os.environ
hvd.init()
assert is_homogeneous() and hvd.elastic is not None
assert (hvd.rank(), hvd.size()) == (0, 1), "no launcher has started it"
print("good")
"""


@pytest.mark.check
def test_a_script_of_horovods_finds_ours_where_it_looks_and_horovod_itself_is_not_replaced():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert run.stdout == "good\n", run.stderr
