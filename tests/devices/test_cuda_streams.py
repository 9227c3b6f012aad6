"""The CUDA path over simulated streams, without a GPU: the scenes of tests/native, with the build's objects. Front ends
on the same streams: whatever test uses tests/helpers/on_streams.py, tests/test_steady_steps.py and
tests/fsdp/test_fsdp_on_streams.py among them."""

import cuda_stress
import pytest

SCENES = ["training_steps", "dropped", "rows", "three_wires", "host_never_waits", "end_in_order"]
SCENES += ["traced", "driver_calls", "failing_calls", "warm_up", "ordering_fails", "failing", "faulted"]
SCENES += ["first_collectives", "aborted", "own_backends", "other_device"]
OF_NCCL = ["nccl_or_torch", "nccl_fails", "nccl_refused"]
OF_LANES = ["lane_streams", "lane_tasks", "watching_thread", "kept_streams"]
OF_LOST_RANKS = ["lost", "lost_with_feedback", "reaching_one"]
CASES = [(scene, seed) for scene in SCENES for seed in (1, 2)]
CASES += [(scene, 1) for scene in (*OF_LANES, *OF_LOST_RANKS, *OF_NCCL)]


@pytest.mark.sampled(by=lambda scene, seed: {"scene": scene})
@pytest.mark.parametrize(("scene", "seed"), CASES)
def test_scene(on_streams_library, scene, seed):
    assert f"{scene}: " in cuda_stress.run(*cuda_stress.command(on_streams_library, scene, seed))
