"""What members do for gradients on CUDA before the first kernel. The rest needs a GPU, or is in
tests/native/members_scenes.cpp, which tests/devices/test_cuda_streams.py runs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import fusedcomm
from fusedcomm.config import Config
from fusedcomm.members.training.recovery import with_recovery_codes
from fusedcomm.ranks import torch_groups

CUDA = torch.device("cuda", 0)


@pytest.fixture
def members():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    made = fusedcomm.Members()
    yield made
    made.leave()
    dist.destroy_process_group()


def test_a_view_has_a_communicator_of_its_own_that_no_watchdog_ends(members, monkeypatch):
    asked = []

    def own_nccl(store, name, *arguments, is_supervised):
        store.set("asked", name)
        asked.append((arguments, is_supervised))
        return "a communicator"

    monkeypatch.setattr(torch_groups, "own_nccl", own_nccl)
    assert "cuda" not in members.group(members.current, torch.device("cpu")).backends
    group = members.group(members.current, CUDA)
    assert group.backends["cuda"] == "a communicator" and group.store.get("asked") == b"members"
    assert asked == [((0, 1, group.timeout, CUDA), False)]


def test_only_sums_whose_codes_are_kept_are_taken_on_cuda(members):
    kept = with_recovery_codes(Config(wire="int8"), members, CUDA)
    assert kept.sum == "two-shot" and kept.hosts is None


def test_other_devices_are_refused():
    with pytest.raises(ValueError, match="gradients are on mps: ranks come and go on cpu or cuda"):
        with_recovery_codes(Config(), SimpleNamespace(microbatches=None), torch.device("mps"))
