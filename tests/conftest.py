"""Fixtures shared by all tests."""

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks():
    """Four long-lived ranks; pass world_size= to use the first few."""
    pool = Ranks(4)
    yield pool
    pool.close()
