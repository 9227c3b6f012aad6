"""An instruction set may leave a code to the scalar arithmetic."""

import subprocess

import pytest
from scripts import compiled

from fusedcomm.native import _C


@pytest.mark.full
def test_a_vector_type_without_codes_of_its_own_gives_the_bits_of_the_scalar_one(tmp_path):
    binary = compiled(tmp_path, "tests/native/codes_by_scalar.cpp")
    printed = subprocess.run([binary], capture_output=True, text=True, check=True).stdout
    assert int(printed) == 5 * sum(_C.has_scales(wire) for wire in _C.WIRES)
