"""The rule of who may go on."""

from hypothesis import given
from hypothesis import strategies as st

from fusedcomm.members.plane.quorum import clique, may_go_on


@st.composite
def splits(draw):
    """A view, and for each member: in group A, in group B, dead, or silent to both."""
    num_members = draw(st.integers(1, 9))
    kinds = draw(st.lists(st.sampled_from("ABDS"), min_size=num_members, max_size=num_members))
    old = [f"u{index}" for index in range(num_members)]
    groups = {kind: [uid for uid, of in zip(old, kinds, strict=True) if of == kind] for kind in "ABDS"}
    known = [draw(st.sets(st.sampled_from(groups["D"]))) if groups["D"] else set() for _ in range(2)]
    return old, groups, known


@given(splits())
def test_two_groups_without_a_common_member_never_both_go_on(split):
    old, groups, (known_to_a, known_to_b) = split
    if groups["A"] and groups["B"]:
        assert not (may_go_on(old, groups["A"], known_to_a) and may_go_on(old, groups["B"], known_to_b))


@given(st.integers(1, 9), st.data())
def test_without_silent_members_any_number_goes_on(num_members, data):
    old = [f"u{index}" for index in range(num_members)]
    alive = data.draw(st.sets(st.sampled_from(old), min_size=1))
    assert may_go_on(old, alive, set(old) - alive)


def test_half_goes_on_with_the_lowest_rank_alone():
    assert may_go_on("abcd", "ab", "")
    assert may_go_on("abcd", "ad", "")
    assert not may_go_on("abcd", "bc", "")
    assert may_go_on("abcd", "b", "ac")  # b is the lowest of b and d
    assert not may_go_on("abcd", "d", "ac")
    assert not may_go_on("abc", "a", "")


def test_those_that_do_not_hear_each_other_part():
    assert clique("abcd", []) == list("abcd")
    assert clique("abc", [("b", "c")]) == list("ab")
    assert clique("abcd", [("b", "a"), ("b", "c"), ("d", "b")]) == list("acd")
    assert clique("abc", [("a", "x")]) == list("abc")
