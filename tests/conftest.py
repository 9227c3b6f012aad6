"""Fixtures shared by all tests."""

import os

import pytest
import torch
from ranks import Ranks

if not torch.cuda.is_available():
    # Triton asks when a kernel is defined: without a GPU it is interpreted, on CPU tensors.
    os.environ["TRITON_INTERPRET"] = "1"

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # there is a worker for each core; threads of several would wait for each other


def pytest_addoption(parser):
    group = parser.getgroup("fusedcomm")
    group.addoption("--side-by-side", action="store_true", help="only tests beside which others may run (for -n)")
    group.addoption("--alone", action="store_true", help="only the others, marked alone")


def pytest_collection_modifyitems(config, items):
    """Leaves out what the options above do."""
    wanted = {True: config.getoption("--alone"), False: config.getoption("--side-by-side")}
    if not any(wanted.values()):
        return
    selected = {True: [], False: []}
    for item in items:
        selected[wanted[item.get_closest_marker("alone") is not None]].append(item)
    items[:] = selected[True]
    config.hook.pytest_deselected(items=selected[False])


@pytest.fixture(scope="session")
def ranks():
    """Four long-lived ranks; pass world_size= to use the first few."""
    pool = Ranks(4)
    yield pool
    pool.close()
