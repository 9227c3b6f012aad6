"""The patterns of ``Config.wires``: which one a parameter goes by, and which ones no parameter goes by.

A tied parameter, as a language model's head that is its embedding, has several names; a pattern matches it by any.
"""

import dataclasses
import difflib
import fnmatch
import heapq
import re
from collections.abc import Iterable, Sequence

import torch

ONE_DIMENSIONAL = "1d"
"""The pattern of biases and norms."""

_NUM_CLOSEST = 3


@dataclasses.dataclass(frozen=True)
class Rule:
    """One pattern, and the wire of what it matches."""

    origin: str
    """"wires", or "default"."""
    pattern: str
    wire: str
    replaces_default: bool = False
    """Without it the default pattern would come before all others."""

    def matches(self, name: str, parameter: torch.Tensor) -> bool:
        if self.pattern == ONE_DIMENSIONAL:
            return parameter.dim() <= 1
        return fnmatch.fnmatchcase(name, self.pattern)

    def matches_any(self, names: Sequence[str], parameter: torch.Tensor) -> bool:
        return any(self.matches(name, parameter) for name in names)

    def __str__(self) -> str:
        return f"{self.origin} pattern {self.pattern!r}"


def rule_for(rules: Sequence[Rule], names: Sequence[str], parameter: torch.Tensor) -> Rule | None:
    """The first of `rules` that matches a name of the parameter's, None if none does.

    Raises:
        ValueError: the first rule that matches another of the names gives another wire, and no name has the two in
            order. "*" after "lm_head.*" matches the head's name, too, and so is no disagreement.
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
    """All names of each tensor, in the order in which the tensors and their names first appear."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [(tuple(names[key]), tensor) for key, tensor in tensors.items()]


def check(rules: Sequence[Rule], named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError for a rule that has no effect on these parameters, tied ones by all their names: one that
    matches none, as a typo does, or only what rules before it have given another wire; or as :func:`rule_for`. "1d"
    and "*" may be for what another model has."""
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
                f"{rule} matches none of the {len(parameters)} parameters that DDP synchronises; the closest names "
                f"are {', '.join(_closest(rule.pattern, [names for names, _ in parameters]))}"
            )
        if rule.replaces_default or rule.pattern == "*" or any(used == rule for _, used in matching):
            continue
        other = next(((name, used) for name, used in matching if used.wire != rule.wire), None)
        if other is not None:
            raise ValueError(
                f"{rule} has no effect: all {len(matching)} parameters that it matches have gone to patterns before "
                f"it, {other[0]!r} to the {other[1]}, for example: put it before that in wires (the default '1d' comes "
                "first unless it is written there, too), or leave it out"
            )


def _closest(pattern: str, parameters: Iterable[Sequence[str]]) -> list[str]:
    """The names most like `pattern`, each with those tied to it; one of names that differ in numbers only, as those of
    layers do."""
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
