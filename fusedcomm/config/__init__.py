"""The options that a user can choose: one configuration for every front end, checked when it is made.

``Config`` has the options that all ranks must share, in groups that belong together. ``LocalOptions`` has those that
may differ from rank to rank. Each option is documented in its class's docstring and nowhere else.
"""

from fusedcomm.config.config import AUTO, OFF, Config
from fusedcomm.config.local import (
    STALL_AFTER_S,
    LocalOptions,
    choose_codec_threads,
    choose_isa,
    choose_stall_after,
    local_options,
)
from fusedcomm.config.options import (
    RESIDUALS,
    ROUNDINGS,
    SUMS,
    WIRES,
    WITH_FEEDBACK,
    WITH_SCALES,
    WITHOUT_SCALES,
    Blocks,
    Chunks,
    Feedback,
    Options,
    Rounding,
    TwoLevels,
)
from fusedcomm.literals import Off, ResidualFormat, RoundingKind, Search, Sum, Wire, WireWithoutScales
from fusedcomm.patterns import ONE_DIMENSIONAL

__all__ = [
    "AUTO",
    "OFF",
    "Off",
    "ONE_DIMENSIONAL",
    "RESIDUALS",
    "ResidualFormat",
    "RoundingKind",
    "Search",
    "Sum",
    "Wire",
    "WireWithoutScales",
    "ROUNDINGS",
    "STALL_AFTER_S",
    "SUMS",
    "WIRES",
    "WITHOUT_SCALES",
    "WITH_FEEDBACK",
    "WITH_SCALES",
    "Blocks",
    "Chunks",
    "Config",
    "Feedback",
    "LocalOptions",
    "Options",
    "Rounding",
    "TwoLevels",
    "choose_codec_threads",
    "choose_isa",
    "choose_stall_after",
    "local_options",
]
