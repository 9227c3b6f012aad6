"""What handles show of themselves: public names, ``repr()``, ``with``, and an error for a misspelt attribute."""

import difflib
import numbers
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


class Sealed:
    """An object that gets no further attributes once it is made: setting one raises AttributeError. Its class names in
    `_shows` what users find with ``dir()``."""

    _shows: tuple[str, ...] = ()
    _is_sealed = False

    def _seal(self) -> None:
        """Call it at the end of ``__init__``."""
        self._is_sealed = True

    def __setattr__(self, name: str, value: object) -> None:
        is_known = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if self._is_sealed and not is_known:
            near = difflib.get_close_matches(name, dir(self), 1)
            hint = f": did you mean {near[0]!r}?" if near else f": it has {', '.join(dir(self))}"
            raise AttributeError(
                f"fusedcomm: {type(self).__name__} has no attribute {name!r}, so setting it would do nothing{hint}"
            )
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({name for kind in type(self).__mro__ for name in vars(kind).get("_shows", ())})

    def _described(self) -> str:
        """What it is now, for repr(); waits for nothing."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """One line, which waits for nothing: ``<fusedcomm.Handle: wire int8, sum auto, 2 ranks>``."""
        return f"<fusedcomm.{type(self).__name__}: {self._described()}>"


class Surface(Sealed):
    """A handle that is attached until :meth:`detach`."""

    _shows: tuple[str, ...] = ("detach", "is_attached")
    _kind = "handle"
    """What errors call the object."""
    _anew = "make another one"
    """What errors advise where the object is detached."""
    is_copy = False

    @property
    def is_attached(self) -> bool:
        """Whether it does anything; False after :meth:`detach`."""
        raise NotImplementedError

    def detach(self) -> None:
        """Ends it."""
        raise NotImplementedError

    def refuse_detached(self, consequence: str) -> None:
        """Raises RuntimeError, with the consequence, if this object is detached."""
        if not self.is_attached:
            raise RuntimeError(f"fusedcomm: this {self._kind} is detached, so {consequence}: {self._anew}")

    def __enter__(self) -> "Self":
        """``with … as comm:`` detaches when the block ends, also if it ends with an error.

        As :meth:`detach`, every rank must leave the block between steps.
        """
        self.refuse_detached("a block cannot detach it")
        return self

    def __exit__(self, *error: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        if self.is_copy or not self.is_attached:
            return f"<fusedcomm.{type(self).__name__}: {'a copy, attached to nothing' if self.is_copy else 'detached'}>"
        return super().__repr__()


class Spelled:
    """For modules and optimizers, to which others give attributes, too: a number that is meant for `weight`, and would
    be set beside it, is an AttributeError."""

    _weight_is = "weight"
    """Where ranks have their weights."""

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        is_property = name == "weight" and hasattr(type(self), "weight")
        is_number = isinstance(value, numbers.Number) or (
            isinstance(value, torch.Tensor) and value.numel() == 1 and not isinstance(value, torch.nn.Parameter)
        )
        if is_number and not is_property and _is_near(name, "weight"):
            raise AttributeError(
                f"fusedcomm: {type(self).__name__}.{name} would do nothing. What this rank weighs is {self._weight_is}"
            )
        super().__setattr__(name, value)


def _is_near(name: str, to: str) -> bool:
    """Whether the letters are the same, in any order, or one is missing or too many."""
    short, long = sorted((name, to), key=len)
    return sorted(name) == sorted(to) or short in [long[:i] + long[i + 1 :] for i in range(len(long))]
