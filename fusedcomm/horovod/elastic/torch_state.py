"""The state of a training script: models, optimizers, samplers and plain values."""

from typing import Any

import torch

from fusedcomm.horovod.elastic.handlers import StateHandler, handler_of
from fusedcomm.horovod.elastic.state import ObjectState
from fusedcomm.horovod.objects import broadcast_object
from fusedcomm.horovod.state import rank


class TorchState(ObjectState):
    """TorchState(model, optimizer, sampler=sampler, epoch=0): each is an attribute. An attribute that has a handler is
    saved when it is set."""

    _handlers: dict[str, StateHandler]

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(
            {name: value for name, value in (("model", model), ("optimizer", optimizer)) if value is not None}
        )
        handlers: dict[str, StateHandler] = {}
        for name, value in kwargs.items():
            if (handler := handler_of(value)) is not None:
                handlers[name] = handler
        object.__setattr__(self, "_handlers", handlers)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(broadcast_object, rank, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in self._handlers:
            self._handlers[name].set_value(value)

    def save(self) -> None:
        """Keeps copies of the handlers' values and of the plain ones."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Goes back to what the last save() kept, in place where a value has a handler."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Gives all values of the rank that has committed most to all ranks. A collective call."""
        root_rank = self.newest_rank()
        for handler in self._handlers.values():
            handler.root_rank = root_rank
            handler.sync()
        self.sync_attributes(root_rank)

    def reset(self) -> None:
        """The ranks have changed: tells the handlers."""
        for handler in self._handlers.values():
            handler.reset()

    def saved(self) -> Any:
        """The copies that the last save() kept: {"handlers": by name, "plain": by name}."""
        return {"handlers": {name: each.saved for name, each in self._handlers.items()}, "plain": self._saved_state}

    def load_saved(self, saved: Any) -> None:
        """Takes over what saved() has returned, but for handlers that this state lacks, and restores it."""
        for name, handler in self._handlers.items():
            if name in saved["handlers"]:
                handler.saved = saved["handlers"][name]
        self._saved_state.update(saved["plain"])
        self.restore()
