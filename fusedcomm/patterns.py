"""The patterns of ``Config.wires``: finds the pattern of a parameter, and refuses patterns without effect.

A tied parameter has several names: a language model's head and its embedding may be one parameter, for example. A
pattern matches it if it matches any of its names.
"""

import dataclasses
import difflib
import fnmatch
import heapq
import re
from collections.abc import Iterable, Sequence

import torch

ONE_DIMENSIONAL = "1d"
"""The pattern of parameters with at most one dimension: biases and norms."""

# Names that an error suggests.
_NUM_CLOSEST = 3


@dataclasses.dataclass(frozen=True)
class Rule:
    """One pattern, and the wire of the parameters that it matches."""

    origin: str
    """The rule's source: "wires" or "default"."""
    pattern: str
    wire: str
    replaces_default: bool = False
    """Whether it takes the place of the default rule, which would otherwise come before all others."""

    def matches(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether the pattern is for a parameter of this name; "1d" is for all with at most one dimension."""
        if self.pattern == ONE_DIMENSIONAL:
            return parameter.dim() <= 1
        return fnmatch.fnmatchcase(name, self.pattern)

    def matches_any(self, names: Sequence[str], parameter: torch.Tensor) -> bool:
        """:meth:`matches` for a parameter that has several names, such as a shared one."""
        return any(self.matches(name, parameter) for name in names)

    def __str__(self) -> str:
        return f"{self.origin} pattern {self.pattern!r}"


def rule_for(rules: Sequence[Rule], names: Sequence[str], parameter: torch.Tensor) -> Rule | None:
    """Returns the first of `rules` that matches any of the parameter's `names`; None if no rule does.

    Raises:
        ValueError: for another of the names, the first rule that matches gives another wire, and no name matches both
            rules. "*" after "lm_head.*" is no such conflict: both match the head's name, so their order decides.
    """
    of_name = {name: [rule for rule in rules if rule.matches(name, parameter)] for name in names}
    first = next((rule for rule in rules if any(rule in matching for matching in of_name.values())), None)
    in_order = {rule for matching in of_name.values() if first in matching for rule in matching}
    for name, matching in of_name.items():
        if not matching or matching[0] in in_order or matching[0].wire == first.wire:
            continue
        other, firsts_name = matching[0], next(name for name in names if first in of_name[name])
        raise ValueError(
            f"{firsts_name!r} and {name!r} are one tied parameter, and the patterns disagree over its wire: {first} "
            f"gives {firsts_name!r} {first.wire!r}, {other} gives {name!r} {other.wire!r}. Leave one of them out, or "
            "give both the same wire"
        )
    return first


def by_tensor(named: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[tuple[str, ...], torch.Tensor]]:
    """Returns every name of each tensor, in the order in which tensors and names first appear."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def check(rules: Sequence[Rule], named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for a rule without effect, and as :func:`rule_for` does.

    A rule has no effect if it matches no parameter, because of a typo for example, or if earlier rules take all that it
    matches and give one of them another wire. "1d" may match nothing. "*", and a "1d" that replaces the default, may
    come too late. They may serve another model.

    Args:
        named: a tied parameter appears once under each of its names.
    """
    parameters = by_tensor(named)
    chosen = [rule_for(rules, names, parameter) for names, parameter in parameters]
    for rule in rules:
        matching = [
            (names[0], used)
            for (names, parameter), used in zip(parameters, chosen, strict=True)
            if rule.matches_any(names, parameter)
        ]
        if not matching and rule.pattern != ONE_DIMENSIONAL:
            raise ValueError(
                f"{rule} matches none of the {len(parameters)} parameters that DDP synchronizes; the closest names "
                f"are {', '.join(_closest(rule.pattern, [names for names, _ in parameters]))}"
            )
        if rule.replaces_default or rule.pattern == "*" or any(used == rule for _, used in matching):
            continue
        other = next(((name, used) for name, used in matching if used.wire != rule.wire), None)
        if other is not None:
            raise ValueError(
                f"{rule} has no effect: all {len(matching)} parameters that it matches match patterns before it, as "
                f"{other[0]!r} the {other[1]}. Put it before that (the default '1d' comes first), or leave it out"
            )


def _closest(pattern: str, parameters: Iterable[Sequence[str]]) -> list[str]:
    """Returns the names most like `pattern`, each with the names tied to it. Names that differ only in their numbers,
    as the layers of a model do, count once."""
    alike: dict[str, tuple[str, Sequence[str]]] = {}
    for names in parameters:
        for name in names:
            alike.setdefault(re.sub(r"\d+", "0", name), (name, names))

    def likeness(named: tuple[str, Sequence[str]]) -> float:
        return difflib.SequenceMatcher(None, pattern.lower(), named[0].lower()).ratio()

    texts = []
    for name, names in heapq.nlargest(_NUM_CLOSEST, alike.values(), key=likeness):
        others = ", ".join(repr(other) for other in names if other != name)
        texts.append(f"{name!r}" + (f" (tied to {others})" if others else ""))
    return texts
