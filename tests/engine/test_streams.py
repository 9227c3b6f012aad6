"""The engine over streams, without a GPU: compiles tests/native/stream_stress.cpp, which simulates an accelerator,
against the installed c10 and runs it."""

from pathlib import Path

import pytest
import stream_stress
from scripts import cxx

pytestmark = pytest.mark.check

LONG_SCENES = ["calls", "steady", "two_levels", "calls_fail"]
SCENES = ["host_never_waits", "end_in_order", "traced", "failing", "faulted", "stopped", "staged_passthrough"]
SCENES += ["lane_streams", "lane_tasks", "watching_thread"]


@pytest.fixture(scope="module")
def program(made_once) -> Path:
    cxx()
    return made_once("streams", stream_stress.build) / "stream_stress"


@pytest.mark.sampled(by=lambda scene: {})
@pytest.mark.parametrize("scene", LONG_SCENES)
def test_scene(program, scene):
    assert f"stream_stress: {scene}:" in stream_stress.run(program, scene)


@pytest.mark.sampled
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("scene", SCENES)
def test_scene_with_other_pauses(program, scene, seed):
    assert f"stream_stress: {scene}:" in stream_stress.run(program, scene, "--seed", str(seed))
