"""The owner's side of a step: waits for this rank's sums, runs the optimizers on them, sends the updates."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.parts import Target, index_by_id
from fusedcomm.optimizer.trial import stand_in

State = dict[str, Any]

_FIRST_POLL_S, _LATER_POLL_S = 1.0, 0.5
"""Between two looks whether another rank has a problem."""


def _wait(future: torch.futures.Future, check: Callable[[], None]) -> None:
    """check: called now and then; raises if another rank has a problem."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    poll = _FIRST_POLL_S
    while not done.wait(poll):
        check()
        poll = _LATER_POLL_S


class StepError(RuntimeError):
    """An optimizer has failed on what this rank owns; the others do not know it."""


class Owner:
    """Runs torch's optimizers on what this rank owns, with one call of step().

    Args:
        groups: of the model's parameters, each with "optimizer_class".
        defaults: arguments of `main`, the class of groups that name none.
        counts: whether an optimizer changes its groups in a step. Then every group has a stand-in for the parameters
            that other ranks own, so that all ranks' groups count alike.

    Attributes:
        groups: the optimizers' own groups, in the order of the model's.
        made: for each group: its optimizer, the optimizer's group, and the model's parameters.
        leaves: by target, (exchange's index, piece, leaf) of each piece that this rank owns.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        groups: Sequence[dict[str, Any]],
        targets: Sequence[Target],
        defaults: dict[str, Any],
        main: type[torch.optim.Optimizer],
        counts: bool,
    ) -> None:
        self._exchanges = exchanges
        self.leaves: dict[int, list[tuple[int, Any, torch.Tensor]]] = {}
        self._sums: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # (target, leaf, its sum)
        for index, exchange in enumerate(exchanges):
            for piece, leaf, of_leaf in exchange.leaves:
                self.leaves.setdefault(piece.target, []).append((index, piece, leaf))
                self._sums.append((piece.target, leaf, of_leaf))
        index_of = index_by_id(targets)
        own: list[dict[str, Any]] = []
        self._stand_ins: list[tuple[set[int], torch.Tensor]] = []  # for these targets of a group
        for group in groups:
            of_group = [index_of[id(p)] for p in group["params"] if id(p) in index_of]
            leaves = [leaf for i in of_group for _, _, leaf in self.leaves.get(i, ())]
            if counts and of_group:
                self._stand_ins.append((set(of_group), stand_in(targets[of_group[0]])))
                leaves.append(self._stand_ins[-1][1])
            own.append({**{k: v for k, v in group.items() if k not in ("optimizer_class", "whole")}, "params": leaves})
        self.optimizers: list[torch.optim.Optimizer] = []
        made: dict[int, tuple[torch.optim.Optimizer, dict[str, Any]]] = {}
        for kind in dict.fromkeys(group["optimizer_class"] for group in groups):
            places = [i for i, group in enumerate(groups) if group["optimizer_class"] is kind]
            optimizer = kind([own[i] for i in places], **(defaults if kind is main else {}))
            self.optimizers.append(optimizer)
            made |= {place: (optimizer, group) for place, group in zip(places, optimizer.param_groups, strict=True)}
        self.made = [(*made[place], group["params"]) for place, group in enumerate(groups)]
        self.groups = [group for _, group, _ in self.made]
        self._of_leaf = {id(leaf): (each, group) for each, group, _ in self.made for leaf in group["params"]}

    def outer_groups(self) -> list[dict[str, Any]]:
        """Groups of the model's parameters with the hyperparameters of the optimizers'."""
        return [{**group, "params": params} for _, group, params in self.made]

    def common_defaults(self) -> dict[str, Any]:
        """The defaults that all optimizers have. torch adds them to every group, and schedulers read in them which
        hyperparameters groups have."""
        first, *others = (each.defaults for each in self.optimizers)
        return {key: value for key, value in first.items() if all(key in each for each in others)}

    def of_leaf(self, leaf: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer that steps a leaf, and the leaf's group."""
        return self._of_leaf[id(leaf)]

    def wait_for_sums(self, check: Callable[[], None]) -> list[torch.Tensor]:
        """The fp32 sums of this rank, of each unit, when all are there."""
        for exchange in self._exchanges:
            _wait(exchange.reduced, check)
            exchange.reduced.wait()
        return [exchange.sum for exchange in self._exchanges]

    def step(self, hyperparameters: list[dict[str, Any]], used: set[int], check: Callable[[], None]) -> None:
        """Ends a pass: steps what this rank owns, and writes all ranks' updates to the parameters.

        hyperparameters: of each group. used: the targets that any rank has used.
        """
        for group, values in zip(self.groups, hyperparameters, strict=True):
            params = group["params"]
            group.clear()
            group.update(values, params=params)
        self.wait_for_sums(check)
        for exchange in self._exchanges:
            exchange.refresh()
        self._step(used)
        sent = [exchange.send() for exchange in self._exchanges]
        for exchange, future in zip(self._exchanges, sent, strict=True):
            _wait(future, check)
            future.wait()  # on an accelerator the current stream waits
            exchange.apply()

    def _step(self, used: set[int]) -> None:
        own = [(leaf, of_leaf) for target, leaf, of_leaf in self._sums if target in used]
        own += [(leaf, torch.zeros_like(leaf)) for of, leaf in self._stand_ins if not of.isdisjoint(used)]
        for leaf, of_leaf in own:
            leaf.grad = of_leaf
        try:
            for optimizer in self.optimizers:
                optimizer.step()
        except Exception as error:
            raise StepError(f"the step of what this rank owns failed: {type(error).__name__}: {error}") from error
        finally:
            for leaf, _ in own:
                leaf.grad = None
