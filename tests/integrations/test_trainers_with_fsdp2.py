"""Each trainer with a model that FSDP2 shards, on two real ranks: plain, attached, saved and resumed."""

import pytest
from sampling import few
from test_trainers import TRAINERS, found_in, trained

pytestmark = pytest.mark.check

NUM_LOSSES = 16  # of eight steps with two passes each


@pytest.fixture(scope="module", params=few(TRAINERS, "transformers"))
def results(request, made_once) -> list[dict]:
    """What each rank has found: {name of a run: {"losses", "digest", …}}."""
    return found_in(trained(made_once, request.param, "fsdp2", request.param))


def test_the_model_is_sharded_and_attached_as_fsdp2(results):
    for each in results:
        sharded = {name: run for name, run in each.items() if name not in ("DDP instead", "warned")}
        assert len(sharded) == 8
        for name, run in sharded.items():
            assert run["sharded"]
            if not name.startswith("plain"):
                num_steps = 4 if name.endswith("resumed") else 8
                # Lightning's strategy reduces in every pass that it accumulates.
                assert run["synchronized"] == num_steps * (2 if "lightning" in run["by"] else 1)
                assert run["handle"].startswith("<fusedcomm.FsdpHandle: wire ")


def test_a_trainer_that_makes_ddp_instead_is_named(results):
    for each in results:
        if "warned" in each:
            assert not each["DDP instead"]["sharded"]
            assert each["DDP instead"]["handle"].startswith("<fusedcomm.Handle: wire fp32")
            (text,) = each["warned"]
            assert text.startswith("fusedcomm: Accelerate was asked for FSDP and has made a DistributedDataParallel")


def test_fp32_trains_as_without_fusedcomm(results):
    for each in results:
        for suffix in ("", ", resumed"):
            assert each["fp32" + suffix]["losses"] == each["plain" + suffix]["losses"]
            assert each["fp32" + suffix]["digest"] == each["plain" + suffix]["digest"]
        assert len(each["plain"]["losses"]) == NUM_LOSSES


@pytest.mark.parametrize("name", ["plain", "fp32", "int4"])
def test_a_resumed_training_has_the_bits_of_one_that_did_not_stop(results, name):
    for each in results:
        assert each[f"{name}, resumed"]["losses"] == each[name]["losses"][NUM_LOSSES // 2 :]
        assert each[f"{name}, resumed"]["digest"] == each[name]["digest"]
    assert results[0][name]["digest"] == results[1][name]["digest"]


def test_with_the_mean_of_residuals_it_trains_on_within_their_noise(results):
    for each in results:
        whole, resumed = each["feedback"]["losses"][NUM_LOSSES // 2 :], each["feedback, resumed"]["losses"]
        assert 0 < max(abs(a - b) for a, b in zip(whole, resumed, strict=True)) < 0.01
        assert each["feedback"]["digest"] != each["plain"]["digest"]
