"""The owner's side of a step: waits for this rank's sums, runs the optimizers on them, sends the updates."""

import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.devices.late import LateAnswers
from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.parts import Target, index_by_id
from fusedcomm.optimizer.trial import stand_in

State = dict[str, Any]

_FIRST_POLL_S, _LATER_POLL_S = 1.0, 0.5
"""Between two looks whether another rank has a problem."""
_MOST_NAMED = 4
"""Parameters in an error."""


Started = concurrent.futures.Future[torch.futures.Future]
"""Gives the future of the all-gather of a unit's updates, once the owner has stepped."""


def _wait(future: torch.futures.Future | Started, check: Callable[[], None]) -> None:
    """check: called now and then; raises if another rank has a problem."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    poll = _FIRST_POLL_S
    while not done.wait(poll):
        check()
        poll = _LATER_POLL_S


def _work_on(work: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    """The thread, which holds no owner between two units."""
    while (unit := work.get()) is not None:
        unit()
        del unit


def _known(sent: torch.futures.Future) -> Started:
    started: Started = concurrent.futures.Future()
    started.set_result(sent)
    return started


class StepError(RuntimeError):
    """An optimizer has failed on what this rank owns; the others do not know it."""


class Owner:
    """Runs torch's optimizers on what this rank owns: with one call of step(), or where they overlap unit by unit.

    Args:
        groups: of the model's parameters, each with "optimizer_class".
        defaults: arguments of `main`, the class of groups that name none.
        overlaps: whether units are stepped while the backward pass goes on: on a CPU on a thread, on an accelerator on
            a stream.
        counts: whether an optimizer changes its groups in a step. Then every group has a stand-in for the parameters
            that other ranks own, so that all ranks' groups count alike.

    Attributes:
        groups: the optimizers' own groups, in the order of the model's.
        leaves: by target, (exchange's index, piece, leaf) of each piece that this rank owns.
    """

    def __init__(
        self,
        exchanges: Sequence[Exchange],
        groups: Sequence[dict[str, Any]],
        targets: Sequence[Target],
        defaults: dict[str, Any],
        device: torch.device,
        overlaps: bool,
        main: type[torch.optim.Optimizer],
        counts: bool,
    ) -> None:
        self._exchanges, self._overlaps, self._device = exchanges, overlaps, device
        self.leaves: dict[int, list[tuple[int, Any, torch.Tensor]]] = {}
        self._sums: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []  # by unit: (target, leaf, its sum)
        for index, exchange in enumerate(exchanges):
            self._sums.append([])
            for piece, leaf, of_leaf in exchange.leaves:
                self.leaves.setdefault(piece.target, []).append((index, piece, leaf))
                self._sums[-1].append((piece.target, leaf, of_leaf))
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
        self._made = [(*made[place], group["params"]) for place, group in enumerate(groups)]
        self.groups = [group for _, group, _ in self._made]
        self._of_leaf = {id(leaf): (each, group) for each, group, _ in self._made for leaf in group["params"]}
        self.hyperparameters: list[dict[str, Any]] = []
        self._written = LateAnswers()
        self._reduced: dict[int, torch.futures.Future] = {}
        self._started: dict[int, Started] = {}
        self._stepped: int | None = None  # on an accelerator, a unit whose updates are not sent yet
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_thread = False
        weakref.finalize(self, self._work.put, None)
        self._stream = torch.Stream(device) if overlaps and device.type != "cpu" else None

    def outer_groups(self) -> list[dict[str, Any]]:
        """Groups of the model's parameters with the hyperparameters of the optimizers'."""
        return [{**group, "params": params} for _, group, params in self._made]

    def common_defaults(self) -> dict[str, Any]:
        """The defaults that all optimizers have. torch adds them to every group, and schedulers read in them which
        hyperparameters groups have."""
        first, *others = (each.defaults for each in self.optimizers)
        return {key: value for key, value in first.items() if all(key in each for each in others)}

    def groups_with_optimizers(self) -> Sequence[tuple[torch.optim.Optimizer, dict[str, Any], list[torch.Tensor]]]:
        """For each group: its optimizer, the optimizer's group, and the model's parameters."""
        return self._made

    def of_leaf(self, leaf: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer that steps a leaf, and the leaf's group."""
        return self._of_leaf[id(leaf)]

    def begin(self, hyperparameters: list[dict[str, Any]]) -> None:
        """Begins a pass. hyperparameters: of each group, used at once where units overlap."""
        self._reduced, self._started, self._stepped = {}, {}, None
        if self._overlaps:
            self._set(hyperparameters)
            for exchange in self._exchanges:
                exchange.begin()

    def reduce(self, index: int) -> None:
        """Begins the sum of a unit, whose gradients are there; where units overlap, also its step."""
        self._reduced[index] = self._exchanges[index].reduce()
        if not self._overlaps:
            return
        if self._stream is not None:
            # Collectives of two communicators must have the same order on every rank, as the hand-overs have.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream, torch.no_grad():
                self._send_stepped()
                self._reduced[index].wait()
                self._step_unit(index)
                self._stepped = index
                if len(self._reduced) == len(self._exchanges):
                    self._send_stepped()
            return
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work_on, args=(self._work,), name="fc-owner", daemon=True).start()
        started = self._started[index] = concurrent.futures.Future()
        self._work.put(functools.partial(self._step_when_reduced, index, self._reduced[index], started))

    def _send_stepped(self) -> None:
        """Begins to send the updates of the unit that was stepped last, if they are not sent.

        The wire runs what it was given in order. It was given the sums of the next unit first, so it has work while
        the owner steps."""
        if self._stepped is not None:
            self._started[self._stepped] = _known(self._exchanges[self._stepped].send())
            self._stepped = None

    @torch.no_grad()
    def _step_when_reduced(self, index: int, reduced: torch.futures.Future, started: Started) -> None:
        try:
            reduced.wait()
            self._step_unit(index)
            started.set_result(self._exchanges[index].send())
        except Exception as error:
            started.set_exception(error)

    def wait_for_sums(self, check: Callable[[], None]) -> list[torch.Tensor]:
        """The fp32 sums of this rank, of each unit, when all are there."""
        for reduced in self._reduced.values():
            _wait(reduced, check)
            reduced.wait()
        return [exchange.sum for exchange in self._exchanges]

    def step(self, hyperparameters: list[dict[str, Any]], used: set[int] | None, check: Callable[[], None]) -> None:
        """Ends a pass: steps what has not been stepped, and writes all ranks' updates to the parameters.

        used: the targets that any rank has used.
        """
        if not self._overlaps:
            self._set(hyperparameters)
            self.wait_for_sums(check)
            for exchange in self._exchanges:
                exchange.refresh()
            self._step([each for sums in self._sums for each in sums], used)
            for index, exchange in enumerate(self._exchanges):
                self._started[index] = _known(exchange.send())
        for index, exchange in enumerate(self._exchanges):
            _wait(self._started[index], check)
            sent = self._started[index].result()
            _wait(sent, check)
            sent.wait()  # on an accelerator the current stream waits
            exchange.apply()

    def changed_parameters(self) -> str:
        """Names of a unit's parameters of which one was written since begin(), where units overlap; empty if none. On
        an accelerator this is found in the next pass."""
        if not self._overlaps or not self._exchanges:
            return ""
        is_changed = torch.stack([exchange.is_changed() for exchange in self._exchanges])
        names = next((each.names() for each in self._written.where(is_changed, self._exchanges)), [])
        return ", ".join(names[:_MOST_NAMED]) + (", …" if len(names) > _MOST_NAMED else "")

    def _set(self, hyperparameters: list[dict[str, Any]]) -> None:
        self.hyperparameters = hyperparameters
        for group, values in zip(self.groups, hyperparameters, strict=True):
            params = group["params"]
            group.clear()
            group.update(values, params=params)

    def _step_unit(self, index: int) -> None:
        self._step(self._sums[index], None)
        for (optimizer, group, _), given in zip(self._made, self.hyperparameters, strict=True):
            changed = [key for key, value in group.items() if key != "params" and value is not given.get(key)]
            if changed:
                what = f"{type(optimizer).__name__}.step() has changed {', '.join(changed)} of its group"
                raise StepError(f"{what}, once for each bucket with overlap: use overlap=False")

    def _step(self, sums: list[tuple[int, torch.Tensor, torch.Tensor]], used: set[int] | None) -> None:
        own = [(leaf, of_leaf) for target, leaf, of_leaf in sums if used is None or target in used]
        own += [
            (leaf, torch.zeros_like(leaf)) for of, leaf in self._stand_ins if used is None or not of.isdisjoint(used)
        ]
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

    def stop(self) -> None:
        """Ends the thread, if there is one."""
        self._work.put(None)
