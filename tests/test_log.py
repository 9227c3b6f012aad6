"""Reports go to the user's handlers, or are printed where there are none."""

import contextlib
import io
import logging
import os

import pytest
from models import Gradients
from torch.nn.parallel import DistributedDataParallel

import fusedcomm
from fusedcomm import log


@contextlib.contextmanager
def bare():
    """The logger as in a process that has configured no logging. Pytest's own handlers, which a test has while it runs,
    are set aside."""
    root, own = logging.getLogger(), log.LOGGER
    handlers, level = root.handlers[:], own.level
    root.handlers[:] = []
    try:
        yield own
    finally:
        root.handlers[:] = handlers
        own.handlers[:] = []
        own.setLevel(level)


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append((record.name, record.levelname, record.getMessage()))


def test_without_a_handler_a_report_is_printed_as_it_is_unless_quiet(capsys):
    with bare() as logger:
        log.report(lambda: "100% of\nthe plan")
        log.report(lambda: 1 / 0, quiet=True)  # nobody sees it, so it is not made
        assert logger.handlers == [] and logger.level == logging.NOTSET  # these are left to the user
    assert capsys.readouterr() == ("100% of\nthe plan\n", "")


@pytest.mark.parametrize("where", ["", "fusedcomm"])
def test_a_handler_takes_the_place_of_the_print_and_quiet_lowers_the_level(capsys, where):
    with bare():
        kept, logger = Kept(), logging.getLogger(where)
        level = logger.level
        logger.addHandler(kept)
        try:
            logger.setLevel(logging.INFO)
            log.report(lambda: "100% of the plan")
            log.report(lambda: "a quiet plan", quiet=True)
            logger.setLevel(logging.DEBUG)
            log.report(lambda: "a quiet plan", quiet=True)
        finally:
            logger.setLevel(level)
            logger.removeHandler(kept)
    assert kept.records == [("fusedcomm", "INFO", "100% of the plan"), ("fusedcomm", "DEBUG", "a quiet plan")]
    assert capsys.readouterr() == ("", "")


def test_a_level_or_a_null_handler_silences_it(capsys):
    with bare() as logger:
        logger.setLevel(logging.WARNING)
        log.report(lambda: "plan")
        logger.setLevel(logging.NOTSET)
        logger.addHandler(logging.NullHandler())
        log.report(lambda: "plan")
    assert capsys.readouterr() == ("", "")


def test_a_report_that_cannot_be_made_or_shown_raises_nothing():
    with bare():
        log.report(lambda: 1 / 0)
        with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="ascii")):
            log.report(lambda: "…")


def attach_twice() -> str:
    """What attaching prints, the second time quietly."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for quiet in (False, True):
            ddp = DistributedDataParallel(Gradients((4000,)))
            fusedcomm.attach(ddp, "bf16", quiet=quiet).detach()
    return out.getvalue()


def logged(rank, world_size):
    """What attaching prints without a handler and with one, and what the handler gets."""
    os.environ.pop("FUSEDCOMM_QUIET", None)
    kept = Kept()
    try:
        printed = attach_twice()
        log.LOGGER.addHandler(kept)
        log.LOGGER.setLevel(logging.DEBUG)
        return kept.records, printed, attach_twice()
    finally:
        log.LOGGER.removeHandler(kept)
        log.LOGGER.setLevel(logging.NOTSET)
        os.environ["FUSEDCOMM_QUIET"] = "1"


def test_rank_0_prints_its_plan_once_at_attach_or_logs_it(ranks):
    (first, printed, beside), (second, *nothing) = ranks.run(logged, world_size=2)
    assert printed.count("fusedcomm: wire bf16") == 1 and "each rank sends" in printed
    assert [(name, level) for name, level, _ in first] == [("fusedcomm", "INFO"), ("fusedcomm", "DEBUG")]
    assert all(text.startswith("fusedcomm: wire bf16") for _, _, text in first)
    assert second == [] and [beside, *nothing] == [""] * 3
