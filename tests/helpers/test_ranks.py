"""tests/helpers/ranks.py: an answer that one test has not read does not reach another test."""

import time

import pytest
from ranks import Ranks


def after(rank, world_size, seconds, answer):
    time.sleep(seconds)
    return answer


def test_a_call_that_is_given_up_does_not_answer_the_next(monkeypatch):
    ranks = Ranks(1)

    def give_up(rank):
        raise TimeoutError("the test's own")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(ranks, "_receive", give_up)
            with pytest.raises(TimeoutError):
                ranks.run(after, 1, "late")
        assert ranks.run(after, 0, "asked for") == ["asked for"]
    finally:
        ranks.close()
