"""The rule of who may go on."""

import itertools

from fusedcomm.members.plane.quorum import clique, may_go_on

DEAD = ("dead to nobody", "dead to A", "dead to B", "dead to A and B")


def test_two_groups_without_a_common_member_never_both_go_on():
    """In all views of at most five members, of which each is in group A, in group B, silent to both, or dead."""
    for num_members in range(2, 6):
        for kinds in itertools.product(("A", "B", "silent", *DEAD), repeat=num_members):
            groups = {name: [uid for uid, kind in enumerate(kinds) if kind == name] for name in "AB"}
            known = {name: [uid for uid, kind in enumerate(kinds) if kind in DEAD and name in kind] for name in "AB"}
            going_on = [may_go_on(range(num_members), groups[name], known[name]) for name in "AB" if groups[name]]
            assert going_on != [True, True], kinds


def test_without_silent_members_any_number_goes_on():
    for num_members in range(1, 8):
        for is_alive in itertools.product((True, False), repeat=num_members):
            alive, dead = ([uid for uid in range(num_members) if is_alive[uid] is wanted] for wanted in (True, False))
            assert not alive or may_go_on(range(num_members), alive, dead)


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
