"""What is kept of an engine's state where there is no engine."""

import torch


class KeptState:
    """A synchronizer's state where there is none: what was loaded, so that steps go on to be counted later."""

    def __init__(self) -> None:
        self.step = 0
        self._nonfinite: dict[str, int] = {}

    def nonfinite_by_parameter(self) -> dict[str, int]:
        """The counts that were loaded."""
        return dict(self._nonfinite)

    def restore_nonfinite(self, counts: dict[str, int]) -> None:
        """Keeps the counts."""
        self._nonfinite = dict(counts)

    def residuals(self) -> dict[str, torch.Tensor]:
        """Empty."""
        return {}

    def residuals_of_encoders(self) -> dict[str, tuple]:
        """Empty."""
        return {}

    def restore_residuals(self, residuals: dict[str, torch.Tensor], *, of_encoders: dict[str, tuple]) -> None:
        """Nothing: a state with residuals has been refused."""

    def take_notices(self) -> list[str]:
        """Empty."""
        return []

    def stop(self, reason: str) -> None:
        """Nothing."""
