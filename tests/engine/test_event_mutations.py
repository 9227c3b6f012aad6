"""Seeded faults in the order of streams: each record, wait, keep-alive and stream switch of the CUDA path is removed by
itself, and a scene with simulated streams must find it.

A removal is an edit of the product's source (tests/helpers/mutations/). The program of the scenes is built with all of
them at once, and an environment variable chooses one.
"""

import os
import subprocess
from pathlib import Path

import cuda_stress
import event_mutations
import pytest
import stream_stress
from patience import HANG_S
from scripts import cxx

LANE_MUTATIONS, CUDA_MUTATIONS = event_mutations.read("lanes"), event_mutations.read("cuda")


def build_streams(folder: Path) -> None:
    mutated = event_mutations.write_sources(LANE_MUTATIONS, folder)
    stream_stress.build(folder, mutated, event_mutations.compile_flags(folder))


@pytest.fixture(scope="module")
def streams(made_once) -> Path:
    cxx()
    return made_once("mutated-streams", build_streams) / "stream_stress"


def build_cuda(folder: Path) -> None:
    event_mutations.write_sources(CUDA_MUTATIONS, folder)
    cuda_stress.link(folder, cuda_stress.compile_unit(folder, event_mutations.compile_flags(folder)))


@pytest.fixture(scope="module")
def cuda(made_once) -> Path:
    cuda_stress.product_objects()
    return made_once("mutated-cuda", build_cuda)


def output_of_failure(command: list[str | Path], index: int) -> str:
    """What a scene prints with a mutation. Fails if the scene passes, or ends in another way than by its own check."""
    choice = {event_mutations.CHOICE: str(index)}
    done = subprocess.run(command, env={**os.environ, **choice}, capture_output=True, text=True, timeout=HANG_S)
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"the removal shows nothing: {output}"
    assert "fails: " in output, f"exit status {done.returncode}: {output}"
    return output


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(LANE_MUTATIONS)), ids=[mutation.where for mutation in LANE_MUTATIONS])
def test_a_removal_from_the_lanes_is_found(streams, index):
    mutation = LANE_MUTATIONS[index]
    output = output_of_failure([streams, mutation.scene], index)
    assert mutation.is_found_in(output), output


@pytest.mark.full
@pytest.mark.parametrize("scene", sorted({mutation.scene for mutation in LANE_MUTATIONS}))
def test_without_a_removal_the_scene_of_lanes_passes(streams, scene):
    stream_stress.run(streams, scene)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(CUDA_MUTATIONS)), ids=[mutation.where for mutation in CUDA_MUTATIONS])
def test_a_removal_from_the_cuda_path_is_found(cuda, index):
    mutation = CUDA_MUTATIONS[index]
    output = output_of_failure(cuda_stress.command(cuda, mutation.scene), index)
    assert mutation.is_found_in(output), output


@pytest.mark.full
@pytest.mark.parametrize("scene", sorted({mutation.scene for mutation in CUDA_MUTATIONS}))
def test_without_a_removal_the_scene_of_the_cuda_path_passes(cuda, scene):
    stream_stress.run(*cuda_stress.command(cuda, scene))


def test_every_removal_has_a_scene_that_says_what_it_finds():
    assert all(mutation.scene and mutation.message for mutation in (*LANE_MUTATIONS, *CUDA_MUTATIONS))


@pytest.mark.parametrize("mutations", [LANE_MUTATIONS, CUDA_MUTATIONS], ids=["lanes", "cuda"])
def test_every_text_that_is_removed_occurs_once(tmp_path, mutations):
    assert event_mutations.write_sources(mutations, tmp_path)
