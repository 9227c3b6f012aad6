"""Which members may go on when others are dead or silent.

Why there are never two groups: a change needs a quorum of the last view known to be active, and of each committed view
after it that may be. Two changes of one view therefore share a member. It acknowledged them one after the other; once
it has promised the later one it never gets ready for the earlier, and once it has committed the earlier it acknowledges
nothing that is based on less.
"""

from collections.abc import Collection, Sequence


def may_go_on(old: Sequence[str], alive: Collection[str], dead: Collection[str]) -> bool:
    """Whether the members `alive` may go on without the rest of the view `old`.

    old: the uids of the old view by rank. alive: those that agree; others than members of `old` do not count. dead:
    those that are proven dead. Whoever is neither alive nor dead is silent, and may be training elsewhere.

    Without silent members: always. Otherwise the living need more than half of all that are not proven dead, or
    exactly half with the lowest rank among these. As long as the dead are dead, no two groups without a common member
    may both go on.
    """
    alive = set(alive)
    possible = [uid for uid in old if uid not in dead or uid in alive]
    agreeing = [uid for uid in possible if uid in alive]
    if len(agreeing) == len(possible):
        return True
    if 2 * len(agreeing) == len(possible):
        return possible[0] in alive
    return 2 * len(agreeing) > len(possible)


def clique(members: Sequence[str], apart: Collection[tuple[str, str]]) -> list[str]:
    """The members, by rank, without one of each pair that does not hear each other.

    apart: pairs of uids. The member with the most such pairs leaves first; of several, the one with the highest rank.
    """
    left = list(members)
    pairs = {frozenset(pair) for pair in apart if len(set(pair)) == 2 and all(uid in left for uid in pair)}
    while pairs:
        counts = {uid: sum(uid in pair for pair in pairs) for uid in left}
        worst = max(left, key=lambda uid: (counts[uid], left.index(uid)))
        left.remove(worst)
        pairs = {pair for pair in pairs if worst not in pair}
    return left
