"""What the trainers' modules share, without a trainer."""

import logging
import subprocess
import sys
import tempfile
import types

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import Config, Feedback
from fusedcomm.integrations.accelerate import attach
from fusedcomm.integrations.attachment import Attachment, need

pytestmark = pytest.mark.check

FEEDBACK = Config("int8", sum="one-shot", feedback=Feedback())


def test_importing_the_package_imports_no_trainer():
    script = (
        "import sys, fusedcomm.integrations, fusedcomm.integrations.accelerate\n"
        "print({'lightning', 'pytorch_lightning', 'accelerate', 'transformers'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


def test_a_name_that_moved_is_named():
    class Trainer:
        old = 1

    need(Trainer, ("old",), "Trainers 9", "Trainers 8")
    with pytest.raises(RuntimeError, match=r"this Trainers 9 has no Trainer.new, Trainer.newer, which fusedcomm uses"):
        need(Trainer(), ("new", "old", "newer"), "Trainers 9", "Trainers 8")
    with pytest.raises(RuntimeError, match=r"Accelerate has no SimpleNamespace.register_for_checkpointing"):
        attach(types.SimpleNamespace(num_processes=2), nn.Linear(2, 2))


def test_a_hook_of_lightning_that_moved_is_named(monkeypatch):
    pl = pytest.importorskip("lightning.pytorch", reason="needs lightning: pip install lightning")
    from fusedcomm.integrations.lightning import FusedCommCallback

    monkeypatch.delattr(pl.Callback, "on_exception")
    with pytest.raises(RuntimeError, match=r"Lightning [\d.]+ has no Callback.on_exception.*Tested with Lightning 2.6"):
        FusedCommCallback("bf16")


def test_what_moved_in_transformers_is_named():
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    from fusedcomm.integrations.transformers import FusedCommCallback

    trainer = types.SimpleNamespace(train=lambda: None)
    with pytest.raises(RuntimeError, match="has no SimpleNamespace.model_wrapped.*Tested with Transformers 5.24"):
        FusedCommCallback(trainer)
    trainer.model_wrapped = None
    with pytest.raises(RuntimeError, match="has no argument resume_from_checkpoint"):
        FusedCommCallback(trainer)


def test_a_model_that_the_trainer_has_not_wrapped_is_refused_with_how():
    accelerator = types.SimpleNamespace(num_processes=2, register_for_checkpointing=None)
    with pytest.raises(TypeError, match="not Linear: wrap the model first.*Accelerate does with model = accel"):
        attach(accelerator, nn.Linear(2, 2), "bf16")


def test_one_rank_has_nothing_to_attach_and_says_so(caplog):
    attachment = Attachment("int8")
    with caplog.at_level(logging.INFO, logger="fusedcomm"):
        attachment.attach(nn.Linear(2, 2), world_size=1, how="")
    assert attachment.handle is None
    assert attachment.state_dict() == {}
    assert "one rank sends no gradients" in caplog.text
    attachment.detach()


def step(ddp: nn.Module, seed: int, scale: float = 1.0) -> None:
    ddp.zero_grad()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    (ddp(x).square().mean() * scale).backward()


def states(rank, world_size):
    """An attachment's own state and what rank 0 saves; then what it has of that after loading it again, and what a new
    attachment has that loads it before it attaches."""
    ddp = DistributedDataParallel(nn.Linear(64, 64), find_unused_parameters=True)
    attachment = Attachment(FEEDBACK)
    attachment.attach(ddp, world_size, "")
    step(ddp, rank)
    step(ddp, 5, float("nan") if rank == 1 else 1.0)  # which rank 1 alone counts
    own, box = attachment.handle.state_dict(), [attachment.state_dict()]
    torch.distributed.broadcast_object_list(box, src=0)
    attachment.load_state_dict(box[0])  # as a trainer does that loads after its setup
    after = attachment.handle.state_dict()
    attachment.detach()
    before = Attachment(FEEDBACK)
    before.load_state_dict(box[0])  # as a trainer does that loads before
    before.attach(ddp, world_size, "")
    again = before.handle.state_dict()
    before.detach()
    return own, box[0], after, again


def same_residuals(one: dict, other: dict) -> bool:
    ours, theirs = one["residuals"], other["residuals"]
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_mean_is_loaded_on_every_rank_and_counts_stay_with_rank_0(ranks):
    results = ranks.run(states, world_size=2)
    ours, theirs = (own["residuals"] for own, *_ in results)
    mean = {"residuals": {name: (ours[name] + theirs[name]) / 2 for name in ours}}
    for rank, (own, saved, after, again) in enumerate(results):
        assert saved["rank"] is None
        for loaded in (after, again):
            assert same_residuals(mean, loaded)
        assert again["nonfinite"] == (own["nonfinite"] if rank == 0 else {})


def loaded_alone(rank, world_size, saved):
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    attachment = Attachment(FEEDBACK)
    attachment.load_state_dict(saved)
    attachment.attach(ddp, world_size, "")
    return attachment.handle.state_dict()


def test_the_mean_is_loaded_on_another_number_of_ranks(ranks):
    saved = ranks.run(states, world_size=2)[0][1]
    (state,) = ranks.run(loaded_alone, saved, world_size=1)
    assert same_residuals(state, saved)


def states_of_fsdp2(rank, world_size):
    """What an attachment to FSDP2 saves and has after loading it; then what DDP and FSDP2 say about each other's."""
    config = Config("int8", feedback=Feedback(), wires={"1d": "int8"})
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("copies", "shards"))
    model = fully_shard(nn.Linear(64, 64), mesh=mesh)
    attachment = Attachment(config)
    attachment.attach(model, world_size, "")
    step(model, rank)
    saved = attachment.state_dict()
    with tempfile.TemporaryFile() as file:  # a trainer's
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    attachment.detach()
    again = Attachment(config)
    again.load_state_dict(saved)
    again.attach(model, world_size, "")
    loaded = again.state_dict()
    ddp = Attachment(FEEDBACK)
    ddp.attach(DistributedDataParallel(nn.Linear(64, 64)), world_size, "", asked_for_fsdp="")
    with pytest.warns(UserWarning, match="an attachment to DDP, which FSDP2 cannot use"):
        again.load_state_dict(ddp.state_dict())
    with pytest.warns(UserWarning, match="an attachment to FSDP2, which DDP cannot use"):
        ddp.load_state_dict(saved)
    again.detach()
    with pytest.warns(
        UserWarning, match="fusedcomm: somebody asked. The model is not sharded, and fusedcomm is attach"
    ):
        Attachment(FEEDBACK).attach(
            DistributedDataParallel(nn.Linear(64, 64)), world_size, "", asked_for_fsdp="somebody asked"
        )
    fusedcomm.attach(model, "bf16").detach()  # nothing was left attached
    return same_residuals(saved, loaded), saved["residuals"]["weight"].abs().sum().item(), loaded["calls"]


def test_an_attachment_to_fsdp2_is_saved_in_one_file_and_loaded(ranks):
    one, other = ranks.run(states_of_fsdp2, world_size=2)
    assert one == other
    is_same, left_out, calls = one
    assert is_same and left_out > 0 and calls == {"(model)": 1}
