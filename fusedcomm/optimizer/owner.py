"""The owner's side of a step: waits for this rank's sums, runs the optimizers on them, sends the updates."""

import concurrent.futures
import functools
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusedcomm.optimizer.exchange import Exchange
from fusedcomm.optimizer.parts import Target, index_by_id

State = dict[str, Any]

_FIRST_POLL_S, _LATER_POLL_S = 1.0, 0.5
"""Between two looks whether another rank has a problem."""


Started = concurrent.futures.Future[torch.futures.Future]
"""Of a unit's updates: the future of their all-gather, once the owner has stepped."""


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
    """Runs torch's optimizers on what this rank owns, unit by unit.

    Args:
        groups: of the model's parameters, each with "optimizer_class".
        defaults: arguments of `main`, the class of groups that name none.
        overlaps: whether units are stepped while the backward pass goes on: on a CPU on a thread, on an accelerator on
            a stream.

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
        for group in groups:
            leaves = [leaf for p in group["params"] for _, _, leaf in self.leaves.get(index_of.get(id(p), -1), ())]
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
        self._call = 0
        self.hyperparameters: list[dict[str, Any]] = []
        self._reduced: dict[int, torch.futures.Future] = {}
        self._started: dict[int, Started] = {}
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._has_thread = False
        weakref.finalize(self, self._work.put, None)
        self._stream = torch.Stream(device) if overlaps and device.type != "cpu" else None

    def outer_groups(self) -> list[dict[str, Any]]:
        """Groups of the model's parameters with the hyperparameters of the optimizers'."""
        return [{**group, "params": params} for _, group, params in self._made]

    def groups_with_optimizers(self) -> Sequence[tuple[torch.optim.Optimizer, dict[str, Any], list[torch.Tensor]]]:
        """Of each group its optimizer, the optimizer's group, and the model's parameters."""
        return self._made

    def of_leaf(self, leaf: torch.Tensor) -> tuple[torch.optim.Optimizer, dict[str, Any]]:
        """The optimizer that steps a leaf, and the leaf's group."""
        return self._of_leaf[id(leaf)]

    def begin(self, call: int, hyperparameters: list[dict[str, Any]]) -> None:
        """Begins a pass. hyperparameters: of each group, used at once where units overlap."""
        self._call = call
        self._reduced, self._started = {}, {}
        if self._overlaps:
            self.hyperparameters = hyperparameters
            self._set(hyperparameters)

    def reduce(self, index: int) -> None:
        """Begins the sum of a unit, whose gradients are there; where units overlap, also its step."""
        self._reduced[index] = self._exchanges[index].reduce(self._call)
        if not self._overlaps:
            return
        if self._stream is not None:
            # In the order of the hand-overs, which is the same on every rank: collectives of two communicators must be.
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream, torch.no_grad():
                self._reduced[index].wait()
                self._step_unit(index, None)
                self._started[index] = _known(self._exchanges[index].send(self._call))
            return
        if not self._has_thread:
            self._has_thread = True
            threading.Thread(target=_work_on, args=(self._work,), name="fc-owner", daemon=True).start()
        started = self._started[index] = concurrent.futures.Future()
        self._work.put(functools.partial(self._step_when_reduced, index, self._reduced[index], started, self._call))

    @torch.no_grad()
    def _step_when_reduced(self, index: int, reduced: torch.futures.Future, started: Started, call: int) -> None:
        try:
            reduced.wait()
            self._step_unit(index, None)
            started.set_result(self._exchanges[index].send(call))
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
            for index, exchange in enumerate(self._exchanges):
                self._step_unit(index, used)
                self._started[index] = _known(exchange.send(self._call))
        for index, exchange in enumerate(self._exchanges):
            _wait(self._started[index], check)
            sent = self._started[index].result()
            _wait(sent, check)
            sent.wait()  # on an accelerator the current stream waits
            exchange.apply()

    def _set(self, hyperparameters: list[dict[str, Any]]) -> None:
        for group, values in zip(self.groups, hyperparameters, strict=True):
            group.update({key: value for key, value in values.items() if key in group})

    def _step_unit(self, index: int, used: set[int] | None) -> None:
        self._exchanges[index].refresh()
        own = [(leaf, of_leaf) for target, leaf, of_leaf in self._sums[index] if used is None or target in used]
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
