"""``Tuning``: what a search of ``config="auto"`` has found."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Tuning:
    """The result of a search. ``str()`` is for people. Equal on every rank."""

    finished: bool
    chosen: str | None
    """The candidate that is kept, "int8" for example, or "off"; None while the search goes on."""
    candidates: tuple[str, ...]
    """What is tried, in the order in which it is preferred."""
    step_ms: dict[str, float]
    """Milliseconds of a step by candidate: the median of its turns on the slowest rank; empty before the first turn."""
    num_steps: int
    """Training steps that the search has taken so far."""
    max_steps: int
    """Training steps that the search takes."""

    @property
    def line(self) -> str:
        """The choice, or how far the search is; never empty."""
        times = ", ".join(f"{name} {step_ms:.4g} ms" for name, step_ms in self.step_ms.items())
        if not self.finished:
            tried = ", ".join(self.candidates)
            return f"config='auto' tries {tried}, step {self.num_steps} of {self.max_steps}: {times or 'no times'}"
        return f"{self.chosen} chosen by config='auto' " + (
            f"in {self.num_steps} steps: {times}" if times else "at once"
        )

    def __str__(self) -> str:
        return f"fusedcomm: {self.line}"
