"""Gradients on CPU: the native codec on worker threads, over gloo contexts of fusedcomm's own."""

import torch
import torch.distributed as dist

from fusedcomm import chunks, config, env
from fusedcomm.native import _C
from fusedcomm.ranks.channels import make_channels, time_link
from fusedcomm.ranks.groups import Group


class CpuPath:
    """One rank's checked options, before the ranks have agreed. ``connect`` makes the engine's device and transport.

    Raises:
        ValueError: an option is out of range, or is for another device.
    """

    has_two_levels = True
    """Whether it is prepared for sums on two levels; the codec needs no preparation."""

    s_per_byte: float | None = None
    """Seconds that the link takes for a byte; None before connect(). See :func:`fusedcomm.chunks.resolved`."""

    def __init__(self, local: config.LocalOptions, world_size: int) -> None:
        self._isa = config.choose_isa(local.isa)
        self._threads = config.choose_codec_threads(local.codec_threads, world_size)

    def connect(
        self, process_group: Group, device: torch.device, store: dist.Store
    ) -> tuple["_C.Device", "_C.C10dTransport"]:
        """The engine's device and transport. A collective call, which also times the link."""
        channels = make_channels(process_group, device, store)
        self.s_per_byte = time_link(channels.scatter)
        native = _C.CpuDevice(isa=self._isa, codec_threads=self._threads, forced_sync=env.sync())
        self.codec = f"{native.isa} × {self._threads} thread(s)"
        max_sending = chunks.max_sending(channels.scatter.size(), self.s_per_byte)
        return native, _C.HostTransport(channels.scatter, channels.gather, max_sending=max_sending)
