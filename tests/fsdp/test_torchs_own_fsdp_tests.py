"""torch's own tests of FSDP2 pass with fusedcomm attached. See tests/helpers/torchs_fsdp_tests.py."""

import pytest
import torchs_fsdp_tests

NONE_THERE = f"torch's tests are not here: set {torchs_fsdp_tests.VARIABLE} to a checkout of PyTorch"


def _outcomes(ranks, name: str, world_size: int, is_attached: bool) -> tuple[list[str], set[str]]:
    """Each rank's outcome, and what attach() said on any of them."""
    outcomes, said = [], set()
    for kind, value in ranks.outcomes(torchs_fsdp_tests.run, name, is_attached, world_size=world_size):
        outcome, words = value if kind == "value" else (f"failed: {value}", ())
        outcomes.append(outcome)
        said |= set(words)
    return outcomes, said


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", torchs_fsdp_tests.names() or [""])
def test_torchs_own_test_passes(ranks, name, world_size):
    if not name:
        pytest.skip(NONE_THERE)
    own_name = name.rpartition(".")[2]
    if world_size == 4 and own_name in torchs_fsdp_tests.LOST_ON_4:
        pytest.skip(torchs_fsdp_tests.LOST_ON_4[own_name])
    plain, _ = _outcomes(ranks, name, world_size, False)
    if set(plain) != {"passed"}:
        first = next(outcome for outcome in plain if outcome != "passed")
        pytest.skip("as it comes it is " + torchs_fsdp_tests.shortened(first))
    attached, said = _outcomes(ranks, name, world_size, True)
    if (reason := torchs_fsdp_tests.LOST.get(own_name)) is not None:
        assert any(outcome != "passed" for outcome in attached), "it is in LOST, and passes"
        pytest.skip(reason)
    assert set(attached) == {"passed"}, "\n".join(attached)
    if said and "attached" not in said:
        pytest.skip("attach() refuses: " + "; ".join(sorted(said)))
    if not said:
        pytest.skip("no model of it has a first forward pass, so nothing is attached")
