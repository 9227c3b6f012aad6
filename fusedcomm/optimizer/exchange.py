"""A unit under way: its gradients' rows, this rank's sums, what it owns, and the rows of updates."""

from collections.abc import Mapping, Sequence

import torch

from fusedcomm.config import Config
from fusedcomm.native import _C
from fusedcomm.optimizer.parts import Piece, Target, Unit, laid_out, shaped
from fusedcomm.session.checksums import in_memory_order, quick
from fusedcomm.session.session import Session

_SAME = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _is_exact(update: Config, target: Target) -> bool:
    """Whether the wire of a parameter's updates has its values exactly."""
    if target.update_wire == _C.EXACT_WIRE:
        return True
    wire = update.numbered_wires[target.update_wire]
    return wire == "fp32" or _SAME.get(wire) == target.tensor.dtype


def written_bits(target: Target) -> torch.Tensor:
    """A checksum of the parameter's values, however they lie in memory."""
    return quick(target.tensor.detach().contiguous())


def _in_row(row: torch.Tensor, piece: Piece) -> torch.Tensor:
    return row[piece.offset :][: piece.end - piece.begin]


class Exchange:
    """Sums a unit's gradients into rows, and sends every rank the updates of this rank's row.

    What is sent of an element is its new value where the wire has it exactly, as fp32 has, and bf16 for a bf16
    parameter. Elsewhere it is the difference from what all ranks have to what the owner has, so what the wire has left
    out is in the next one.

    An element of a parameter that has other bits than this object has written there was written by something else, and
    the owner takes it over.

    Args:
        sums, updates: the sessions of the reduce-scatters and of the all-gathers.
        index: of the unit.
        is_last: whether no unit follows in a step.

    Attributes:
        owned: this rank's elements in fp32, [row_numel].
        sum: the mean of their gradients, fp32 [row_numel], while a step is under way.
        reduced: the future of `sum`, from reduce() on.
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
        # Whether the new values of a piece travel, and not their differences.
        self._is_value = {piece: _is_exact(update, targets[piece.target]) for piece in unit.pieces}
        all_values = all(self._is_value.values())
        # The gradients are summed when updates come, so these may take their place.
        self._results = self._rows if all_values or unit.dtype == torch.float32 else self._rows.float()
        # The row that travels. Between two steps it has this rank's elements as they were last seen or written.
        self._sent = self.owned if all_values else torch.zeros_like(self.owned)
        self._own = [piece for piece in unit.pieces if piece.owner == rank]
        self.leaves = [(piece, self._view(self.owned, piece), self._view(self.sum, piece)) for piece in self._own]
        self._of_target: dict[int, list[tuple[Piece, torch.Tensor]]] = {}
        for piece in unit.pieces:
            place = self._in_rows(self._rows, piece)
            self._of_target.setdefault(piece.target, []).append((piece, place))
        self._loaded: dict[int, int] = {}  # of targets with a loaded master: checksum of the parameter it belongs to
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

    def _flat(self, target: int, tensor: torch.Tensor) -> torch.Tensor:
        """[numel] of a parameter or its gradient: a view, or a copy where it lies otherwise than the parameter did."""
        found = self._targets[target]
        if tensor.shape != found.layout.shape:
            shapes = f"{list(found.layout.shape)} before, and now {list(tensor.shape)}"
            raise RuntimeError(f"{found.name} has the shape {shapes}: make the GradReducer and its optimizer anew")
        return in_memory_order(laid_out(tensor.detach(), found.layout))

    def _in_parameter(self, piece: Piece) -> torch.Tensor:
        """A piece in its parameter, wherever that lies now."""
        return self._flat(piece.target, self._targets[piece.target].tensor)[piece.begin : piece.end]

    def _now(self) -> torch.Tensor:
        """A copy of this rank's elements of the parameters: fp32 [row_numel]."""
        now = torch.zeros_like(self.owned)
        if self._own:
            torch._foreach_copy_([_in_row(now, piece) for piece in self._own], list(map(self._in_parameter, self._own)))
        return now

    def _view(self, row: torch.Tensor, piece: Piece) -> torch.Tensor:
        """The elements of a piece in a row, those of a whole parameter in its shape. A parameter without dimensions is
        always whole, and so is its optimizer's state."""
        target, elements = self._targets[piece.target], _in_row(row, piece)
        return shaped(elements, target.layout) if target.whole or target.layout.dim() == 0 else elements

    @property
    def plans(self) -> "list[_C.BucketPlan]":
        """What is sent in a step: of gradients, and of updates."""
        return [self._native_sums.plan(gathers=False), self._native_updates.plan(gathers=True)]

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of the rows of gradients and updates, and of this rank's row."""
        tensors = {id(each): each for each in (self._rows, self._results, self._sent, self.sum)}
        tensors.pop(id(self.owned), None)
        return sum(each.nbytes for each in tensors.values())

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
            flat = self._flat(target, gradient)
            for piece, place in self._of_target[target]:
                places.append(place)
                values.append(flat[piece.begin : piece.end])
        if places:
            torch._foreach_copy_(places, values)

    def reduce(self) -> None:
        """Begins the sum of the ranks' rows: `sum` has this rank's when `reduced` is done."""
        factor = 1.0 / self._sums.world_size
        self.reduced: torch.futures.Future = self._native_sums.reduce_scatter(
            rows=self._rows, own=self.sum, factor=factor, is_last=self._is_last
        )

    @torch.no_grad()
    def refresh(self, everything: bool = False) -> None:
        """Takes over elements of parameters that something else has written, in whatever way, since this object did.

        everything: all elements."""
        now = self._now()
        # If values travel, the fp32 copy gives the elements that this object wrote.
        written = self.owned.to(self.unit.dtype).float() if self._sent is self.owned else self._sent
        for piece in self._own if self._sent is not self.owned else ():
            loaded = self._loaded.get(piece.target)
            if loaded is not None and loaded == written_bits(self._targets[piece.target]).item():
                _in_row(written, piece).copy_(_in_row(now, piece))
        self._loaded.clear()
        # Bits are compared, because NaN is not equal to itself.
        is_other = now.view(torch.int32) != written.view(torch.int32)
        self.owned.copy_(now if everything else torch.where(is_other, now, self.owned))
        if self._sent is not self.owned:
            self._sent.copy_(now)

    def trust_master(self, target: int, bits: int) -> None:
        """The next refresh() leaves a loaded master as it is if the parameter has these bits then, though something has
        written them: torch's set_state_dict() loads the model after the optimizer."""
        self._loaded[target] = bits

    def send(self) -> torch.futures.Future:
        """Begins to send this rank's updates to all ranks: apply() may be called when the future is done."""
        if self._sent is not self.owned:
            with torch.no_grad():
                torch.sub(self.owned, self._sent, out=self._sent)
                for piece in self._own:
                    if self._is_value[piece]:
                        _in_row(self._sent, piece).copy_(_in_row(self.owned, piece))
        return self._native_updates.all_gather(rows=self._results, own=self._sent, is_last=self._is_last)

    def apply(self) -> None:
        """Writes all ranks' updates to the parameters."""
        for i in self.unit.targets:
            lies = self._targets[i].tensor.detach()
            laid = laid_out(lies, self._targets[i].layout)
            if laid is not lies:  # views of it can be written
                self._targets[i].tensor.data = laid
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
            if self._sent is not self.owned:
                self._sent.copy_(self._now())


def session_of_rows(old: Session, config: Config) -> Session:
    """A session whose sums are of rows, watched in place of `old`."""
    session = Session(
        config,
        old.process_group,
        old.parameters,
        old.local,
        old.device,
        beside=old,
        reduces_rows=True,
        watched=False,
    )
    old.unwatch()
    session.watch()
    return session
