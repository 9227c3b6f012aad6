"""The CUDA path over simulated streams, without a GPU: tests/native/cuda_stress.cpp, members_scenes.cpp and
rows_scenes.cpp, with the build's objects."""

from pathlib import Path

import cuda_stress
import pytest
from scripts import built
from stream_stress import run

SCENES = ["training_steps", "dropped", "calls", "failing_calls", "warm_up"]


def build(folder: Path) -> None:
    cuda_stress.link(folder, built(cuda_stress.UNIT))


@pytest.fixture(scope="module")
def library(made_once) -> Path:
    cuda_stress.product_objects()
    return made_once("cuda-streams", build)


@pytest.mark.full
@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(library, scene, seed):
    assert f"cuda_stress: {scene}:" in run(*cuda_stress.command(library, scene, seed))


@pytest.mark.full
@pytest.mark.parametrize("scene", ["lost", "lost_with_feedback", "reaching_one"])
def test_ranks_that_are_lost_in_any_collective(library, scene):
    assert f"members_scenes: {scene}:" in run(*cuda_stress.command(library, scene, 1, "run_members"))


def test_owners_step_on_a_stream_of_their_own(library):
    assert "rows_scenes: owners:" in run(*cuda_stress.command(library, "owners", 1, "run_rows"))
