"""The CUDA path over simulated streams, without a GPU: tests/native/cuda_stress.cpp and members_scenes.cpp, with the
build's objects. Front ends on the same streams: tests/local_steps/test_local_steps.py, tests/optimizer."""

import cuda_stress
import pytest
from stream_stress import run

SCENES = ["training_steps", "dropped", "calls", "failing_calls", "warm_up"]


@pytest.mark.full
@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(on_streams_library, scene, seed):
    assert f"cuda_stress: {scene}:" in run(*cuda_stress.command(on_streams_library, scene, seed))


@pytest.mark.full
@pytest.mark.parametrize("scene", ["lost", "lost_with_feedback", "reaching_one"])
def test_ranks_that_are_lost_in_any_collective(on_streams_library, scene):
    assert f"members_scenes: {scene}:" in run(*cuda_stress.command(on_streams_library, scene, 1, "run_members"))
