"""Horovod's own tests pass over ours. See tests/helpers/horovods_tests.py for where they come from."""

import horovods_tests
import pytest
from ranks import RankError

pytestmark = pytest.mark.check

NONE_THERE = (
    f"Horovod's tests are not here: set {horovods_tests.VARIABLE} or --horovods-tests to a checkout of Horovod, or "
    "pass --fetch-horovods-tests"
)


@pytest.mark.sampled
@pytest.mark.parametrize("world_size", [2, 1, 3, 4])
@pytest.mark.parametrize("name", horovods_tests.names() or [""])
def test_horovods_own_test_passes(ranks, name, world_size):
    if not name:
        pytest.skip(NONE_THERE)
    if "adasum" in name.lower():
        pytest.skip("is of Adasum, which is not here")
    if (name, world_size) in horovods_tests.CANNOT_ON:
        pytest.skip(horovods_tests.CANNOT_ON[name, world_size])
    for tries_left in reversed(range(horovods_tests.NUM_TRIES if name in horovods_tests.BY_CHANCE else 1)):
        try:
            outcomes = set(ranks.run(horovods_tests.run, name, world_size=world_size))
            break
        except RankError:
            if not tries_left:
                raise
    skipped = {outcome.removeprefix("skipped: ") for outcome in outcomes if outcome != "passed"}
    assert skipped <= set(horovods_tests.CANNOT), f"no known reason to skip: {skipped - set(horovods_tests.CANNOT)}"
    if skipped:
        pytest.skip("; ".join(f"{text}: {horovods_tests.CANNOT[text]}" for text in sorted(skipped)))
