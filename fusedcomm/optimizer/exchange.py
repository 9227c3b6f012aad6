"""A unit under way: its gradients' rows, this rank's sums, what it owns, and the rows of updates."""

from collections.abc import Mapping, Sequence

import torch

from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.optimizer.parts import Piece, Target, Unit, in_memory_order, shaped
from fusedcomm.session.session import Session

_SAME = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _is_exact(update: Config, target: Target) -> bool:
    """Whether the wire of a parameter's updates has its values exactly."""
    if target.update_wire == _C.EXACT_WIRE:
        return True
    wire = update.numbered_wires[target.update_wire]
    return wire == "fp32" or _SAME.get(wire) == target.tensor.dtype


def _in_row(row: torch.Tensor, piece: Piece) -> torch.Tensor:
    return row[piece.offset :][: piece.end - piece.begin]


class Exchange:
    """Sums a unit's gradients into rows, and sends every rank the updates of this rank's row.

    What is sent of an element is its new value where the wire has it exactly, as fp32 has, and bf16 for a bf16
    parameter. Elsewhere it is the difference from what all ranks have to what the owner has, so what the wire has left
    out is in the next one.

    Args:
        sums, updates: the sessions of the reduce-scatters and of the all-gathers.
        index: of the unit.
        is_last: whether no unit follows in a step.

    Attributes:
        owned: this rank's elements in fp32, [row_numel].
        sum: the mean of their gradients, fp32 [row_numel], while a step is under way.
        leaves: (piece, view of `owned`, view of `sum`) of each own piece; whole parameters have their shape.
    """

    def __init__(
        self,
        unit: Unit,
        targets: Sequence[Target],
        sums: Session,
        updates: Session,
        update: Config,
        index: int,
        is_last: bool,
    ) -> None:
        self.unit, self._is_last = unit, is_last
        self._targets, self._sums, self._updates = targets, sums, updates
        size, rank, device = sums.world_size, sums.rank, sums.device
        row = unit.row_numel
        self._rows = torch.zeros(size * row, dtype=unit.dtype, device=device)
        self.owned = torch.zeros(row, dtype=torch.float32, device=device)
        self.sum = torch.zeros(row, dtype=torch.float32, device=device)
        self._native_sums = self._native(sums, index, [wire for wire, _, _ in unit.classes])
        self._native_updates = self._native(updates, index, [wire for _, wire, _ in unit.classes])
        # Of each piece, whether its new values travel, and not their differences.
        self._is_value = {piece: _is_exact(update, targets[piece.target]) for piece in unit.pieces}
        all_values = all(self._is_value.values())
        # The gradients are summed when updates come, so these may take their place.
        self._results = self._rows if all_values or unit.dtype == torch.float32 else self._rows.float()
        self._sent = self.owned if all_values else torch.zeros_like(self.owned)
        self._own = [piece for piece in unit.pieces if piece.owner == rank]
        self.leaves = [(piece, self._view(self.owned, piece), self._view(self.sum, piece)) for piece in self._own]
        self._of_target: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
        for piece in unit.pieces:
            place = self._in_rows(self._rows, piece)
            self._of_target.setdefault(piece.target, []).append((piece, place))
        self._seen: dict[int, int] = {}  # versions of own parameters when `owned` had them
        self.refresh(everything=True)

    def _native(self, session: Session, index: int, wires: list[int]) -> "_C.Rows":
        pieces = [
            (f"rows of unit {index}, class {place}", numel, wire)
            for place, (wire, (_, _, numel)) in enumerate(zip(wires, self.unit.classes, strict=True))
        ]
        assert session.synchronizer is not None
        native = _C.Rows(synchronizer=session.synchronizer, index=index, pieces=pieces)
        native.set_row(list(range(len(pieces))))
        return native

    def _in_rows(self, rows: torch.Tensor, piece: Piece) -> torch.Tensor:
        """A piece in the rows of all ranks."""
        return _in_row(rows[piece.owner * self.unit.row_numel :], piece)

    def _in_parameter(self, piece: Piece) -> torch.Tensor:
        """A piece in its parameter, wherever that lies now."""
        return in_memory_order(self._targets[piece.target].tensor)[piece.begin : piece.end]

    def _view(self, row: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Of a piece in a row; of a whole parameter with its shape."""
        target = self._targets[piece.target]
        return shaped(_in_row(row, piece), target.tensor) if target.whole else _in_row(row, piece)

    @property
    def sent_nbytes(self) -> int:
        """Bytes that this rank sends in a step."""
        return self._native_sums.sent_nbytes + self._native_updates.sent_nbytes

    @property
    def buffer_nbytes(self) -> int:
        """Of rows of gradients and updates, and of this rank's."""
        tensors = {id(each): each for each in (self._rows, self._results, self._sent, self.sum)}
        tensors.pop(id(self.owned), None)
        return sum(each.nbytes for each in tensors.values())

    @property
    def residual_nbytes(self) -> int:
        """Of this rank's residuals of gradients."""
        return self._native_sums.residual_nbytes

    def keeps_master(self, piece: Piece) -> bool:
        """Whether `owned` has more of a piece than the parameter."""
        is_fp32 = self._targets[piece.target].tensor.dtype == torch.float32
        return not is_fp32 or not self._is_value[piece]

    def take(self, gradients: Mapping[int, torch.Tensor]) -> None:
        """Copies gradients, by target, to their rows; of those that are not in this unit, nothing."""
        places, values = [], []
        for target, gradient in gradients.items():
            if target not in self._of_target:
                continue
            flat = in_memory_order(gradient)
            for piece, place in self._of_target[target]:
                places.append(place)
                values.append(flat[piece.begin : piece.end])
        if places:
            torch._foreach_copy_(places, values)

    def reduce(self, call: int) -> torch.futures.Future:
        """Begins the sum of the ranks' rows: `sum` has this rank's when the future is done."""
        factor = 1.0 / self._sums.world_size
        return self._native_sums.reduce_scatter(
            rows=self._rows, own=self.sum, factor=factor, call=call, is_last=self._is_last
        )

    def refresh(self, everything: bool = False) -> None:
        """Takes over parameters that something else has changed since the last update, as loading a checkpoint does."""
        with torch.no_grad():
            for piece in self._own:
                tensor = self._targets[piece.target].tensor
                seen = self._seen.get(piece.target, tensor._version)
                if everything or not self.keeps_master(piece) or seen != tensor._version:
                    _in_row(self.owned, piece).copy_(self._in_parameter(piece))
        self.note_versions()

    def trust_master(self, target: int) -> None:
        """The next refresh() leaves a loaded master as it is: torch's set_state_dict() loads the model after it."""
        self._seen.pop(target, None)

    def note_versions(self) -> None:
        """From now on own parameters count as changed if their version is another."""
        self._seen = {piece.target: self._targets[piece.target].tensor._version for piece in self._own}

    def send(self, call: int) -> torch.futures.Future:
        """Begins to send this rank's updates to all ranks: apply() may be called when the future is done."""
        if self._sent is not self.owned:
            with torch.no_grad():
                self._sent.copy_(self.owned)
                for piece in self._own:
                    if not self._is_value[piece]:
                        _in_row(self._sent, piece).sub_(self._in_parameter(piece))
        return self._native_updates.all_gather(rows=self._results, own=self._sent, call=call, is_last=self._is_last)

    def apply(self) -> None:
        """Writes all ranks' updates to the parameters."""
        values: tuple[list, list] = ([], [])
        differences: tuple[list, list] = ([], [])
        for piece, is_value in self._is_value.items():
            lists = values if is_value else differences
            lists[0].append(self._in_parameter(piece))
            lists[1].append(self._in_rows(self._results, piece))
        with torch.no_grad():
            if values[0]:
                torch._foreach_copy_(*values)
            if differences[0]:
                torch._foreach_add_(*differences)
        self.note_versions()
