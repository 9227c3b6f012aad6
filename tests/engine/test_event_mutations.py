"""Seeded faults in the order of streams: each record, wait, keep-alive and stream switch of the CUDA path is removed by
itself, and a scene with simulated streams must find it.

A removal is an edit of the product's source (tests/helpers/mutations/). The library of the scenes is built with all of
them at once, and an environment variable chooses one.
"""

import os
import subprocess
from pathlib import Path

import cuda_stress
import event_mutations
import pytest
from patience import HANG_S

MUTATIONS = event_mutations.read("streams")


def build(folder: Path) -> None:
    event_mutations.write_sources(MUTATIONS, folder)
    cuda_stress.build(folder, event_mutations.compile_flags(folder))


@pytest.fixture(scope="module")
def mutated(made_once) -> Path:
    return made_once("mutated", build)


@pytest.mark.full
@pytest.mark.parametrize("index", range(len(MUTATIONS)), ids=[mutation.where for mutation in MUTATIONS])
def test_a_removal_is_found(mutated, index):
    mutation, choice = MUTATIONS[index], {event_mutations.CHOICE: str(index)}
    command = cuda_stress.command(mutated, mutation.scene)
    done = subprocess.run(command, env={**os.environ, **choice}, capture_output=True, text=True, timeout=HANG_S)
    output = done.stdout + done.stderr
    assert done.returncode != 0, f"the removal shows nothing: {output}"
    assert "fails: " in output, f"exit status {done.returncode}: {output}"  # by the scene's own check
    assert mutation.is_found_in(output), output


def test_every_text_that_is_removed_occurs_once(tmp_path):
    event_mutations.write_sources(MUTATIONS, tmp_path)
    assert MUTATIONS and all(mutation.scene and mutation.message for mutation in MUTATIONS)
