"""Fixtures shared by all tests."""

import os

import pytest
import torch
from ranks import Ranks

if not torch.cuda.is_available():
    # Triton asks when a kernel is defined: without a GPU it is interpreted, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def ranks():
    """Four long-lived ranks; pass world_size= to use the first few."""
    pool = Ranks(4)
    yield pool
    pool.close()
