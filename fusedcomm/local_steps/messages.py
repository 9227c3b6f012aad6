"""The messages of merges: what ranks send beside the differences, and what they learn from it."""

import dataclasses
import math
import time

import torch

from fusedcomm.devices.late import HostCopy
from fusedcomm.local_steps.merged_state import MergedState, squares
from fusedcomm.local_steps.windows import Window
from fusedcomm.native import _C
from fusedcomm.session.session import Session

CONTROL = "control of a merge"
"""The name of the numbers that come with a message: the weight, ‖difference‖², whether the rank has ended its
training, and the checksum's bits. They are sent exactly."""
_BITS = 32
_FIRST_BIT = 3
CONTROL_NUMEL = _FIRST_BIT + _BITS


@dataclasses.dataclass
class Message:
    """A message: its merge is under way."""

    began: int
    """Steps after which the snapshot was taken."""
    due: int
    """Steps after which it is merged."""
    own: torch.Tensor
    """fp32: this rank's difference from the merged state."""
    mean: torch.Tensor
    """fp32: own × weight; once the message has arrived the ranks' mean of that, and once it is read their mean
    difference."""
    checksum: torch.Tensor
    """The merged state's before the merge, as MergedState.checksum() has it."""
    number: int = 0
    """Counts messages."""
    weight: float = 1.0
    """This rank's weight, in the unit that all ranks share."""
    is_finishing: bool = False
    """Whether this rank has ended its training."""
    future: object | None = None
    """Done when the message has arrived; None from then on."""
    control: torch.Tensor = dataclasses.field(default_factory=lambda: torch.empty(0, dtype=torch.float32))
    numbers: HostCopy | None = None
    """On an accelerator, what read() needs on the host, on its way since the message was sent."""
    all_finish: bool = False
    """Whether all ranks had ended their training, once the message is read."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """How far the ranks were apart at a merge. Equal on every rank."""

    drift: float
    """√(mean over the ranks of ‖own difference − mean difference‖²) / ‖merged state‖."""
    agreement: float
    """‖mean difference‖² / mean of ‖own difference‖²: 1 if all ranks went the same way, 1 / ranks if each went its
    own."""


class Messages:
    """Sums the ranks' differences from the merged state.

    window: is told when a message leaves and when it arrives; None without one.
    """

    def __init__(self, session: Session, state: MergedState, window: Window | None) -> None:
        self._session, self._state, self._window = session, state, window
        self.waited_s = 0.0
        """Seconds that this rank has waited for messages."""
        self._reading = None if session.device.type == "cpu" else torch.Stream(session.device)
        assert session.synchronizer is not None  # a session that has none raises where it is made
        wires = state.wires()  # not this object, which has the synchronizer
        session.synchronizer.choose_wires(lambda name, num_dims: wires.get(name, _C.EXACT_WIRE))
        self._sum = _C.FusedSum(session.synchronizer)

    def send(self, message: Message) -> None:
        """Hands a message to the engine, which sends it while training goes on."""
        message.mean = message.own.clone() if message.weight == 1 else message.own * message.weight
        # Filled where it is used, so that the host need not wait for an accelerator.
        control = message.control = torch.empty(CONTROL_NUMEL, dtype=torch.float32, device=message.mean.device)
        control[0] = message.weight
        control[1] = squares(message.own)
        control[2] = message.is_finishing
        control[_FIRST_BIT:] = _bits(message.checksum)
        tensors = self._state.tensors(message.mean)
        window, number = self._window, message.number
        if window is not None:
            window.wait_for(number, self._session.rank)
        message.future = future = self._sum.run(
            names=[*tensors, CONTROL], tensors=[*tensors.values(), message.control], ends_step=True
        )
        # On an accelerator the sum is only enqueued then.
        if window is not None and self._reading is None:
            future.add_done_callback(lambda _: window.arrived(number))
        if self._reading is not None:
            # Steps follow before the message is read. On their stream the host would wait for these.
            with self._reading, torch.no_grad():
                message.future.wait()  # type: ignore[attr-defined]
                message.numbers = HostCopy(self._numbers(message))
                # A message that is given up is not read.
                for tensor in (message.mean, message.control, message.checksum, self._state.anchor):
                    tensor.record_stream(self._reading)

    def wait(self, message: Message) -> None:
        """Waits for a message. Raises RuntimeError if the sum has failed."""
        if message.future is not None:
            begin = time.perf_counter()
            message.future.wait()  # type: ignore[attr-defined]  # torch's, which lets other threads run
            self.waited_s += time.perf_counter() - begin

    def read(self, message: Message) -> Spread:
        """Reads a message that has arrived, once. Raises RuntimeError if the ranks' merged states differ."""
        message.future = None
        numbers = HostCopy(self._numbers(message)) if message.numbers is None else message.numbers
        values = numbers.tolist()
        weight, of_own, finishing, *bits = values[:CONTROL_NUMEL]
        of_mean, of_anchor, *own_bits = values[CONTROL_NUMEL:]
        if self._window is not None and self._reading is not None:
            self._window.arrived(message.number)
        self._compare(message, bits, own_bits)
        message.all_finish = finishing > 1 - 0.5 / self._session.world_size
        if weight not in (0, 1):
            message.mean, of_mean = message.mean / weight, of_mean / weight**2
        size, apart = math.sqrt(of_anchor), math.sqrt(max(of_own - of_mean, 0.0))
        return Spread(apart / size if size else math.inf if apart else 0.0, of_mean / of_own if of_own else 1.0)

    def _numbers(self, message: Message) -> torch.Tensor:
        """float64: the control's numbers as they have arrived, ‖mean difference‖², ‖merged state‖², the checksum's
        bits."""
        squared = [squares(message.mean), squares(self._state.anchor)]
        return torch.cat([message.control.double(), torch.stack(squared), _bits(message.checksum).double()])

    def _compare(self, message: Message, means: list[float], own: list[float]) -> None:
        # If one rank differs in a bit, the bit's mean is off by at least 1 / ranks on every rank with the other value.
        tolerance = 0.25 / self._session.world_size
        if all(abs(mean - bit) <= tolerance for mean, bit in zip(means, own, strict=True)):
            return
        checksum = sum(1 << bit for bit, is_set in enumerate(own) if is_set)
        raise RuntimeError(
            f"fusedcomm: the merged state is not the same on every rank (checksum {checksum:08x} on rank "
            f"{self._session.rank}, before merge {message.number}): a rank has changed it, has loaded another "
            "checkpoint, or computes other bits. Load the same state on every rank"
        )


def _bits(checksum: torch.Tensor) -> torch.Tensor:
    return (checksum >> torch.arange(_BITS, dtype=torch.int64, device=checksum.device) & 1).to(torch.float32)
