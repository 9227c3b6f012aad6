"""What each front end refuses: arguments, models, and ranks that differ. The tables are the modules beside this one."""

import pickle

import attach_rows
import combination_rows
import config_rows
import data_parallel_rows
import fsdp_rows
import horovod_rows
import local_rows
import members_rows
import optimizer_rows
import pytest
import reducer_rows
from refusals import Row, run_rows, said

TABLES = [
    *(combination_rows, config_rows, attach_rows, reducer_rows, data_parallel_rows, fsdp_rows),
    *(optimizer_rows, local_rows, horovod_rows, members_rows),
]
ROWS: list[Row] = [row for table in TABLES for row in table.ROWS]


@pytest.fixture(scope="session")
def texts_of(ranks, request, made_once):
    """A function that returns the texts of a row. Its first call for a number of ranks runs all selected rows."""
    chosen = [item.callspec.params["index"] for item in request.session.items if "texts_of" in item.fixturenames]

    def texts_of(index: int) -> list[str]:
        number = ROWS[index].num_ranks
        if number == 0:
            return [said(ROWS[index], 0)]
        indices = [each for each in chosen if ROWS[each].num_ranks == number]
        folder = made_once(f"refusals-{number}", lambda made: run_rows(ranks, __name__, indices, number, made))
        return pickle.loads((folder / "texts").read_bytes())[index]

    return texts_of


@pytest.mark.parametrize("index", range(len(ROWS)), ids=lambda index: str(ROWS[index]))
def test_every_rank_is_told_what_is_wrong(texts_of, index):
    ROWS[index].check(texts_of(index))
