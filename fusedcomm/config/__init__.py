"""The options that a user can choose: one configuration for every front end, checked when it is made.

``Config`` has the options that all ranks must share, in groups that belong together. ``LocalOptions`` has those that
may differ from rank to rank. Each option is documented in its class's docstring and nowhere else.
"""

from fusedcomm.config.config import AUTO, OFF, Config
from fusedcomm.config.local import (
    LocalOptions,
    choose_codec_threads,
    choose_isa,
    local_options,
)
from fusedcomm.config.options import (
    SUMS,
    WIRES,
    WITH_SCALES,
    WITHOUT_SCALES,
    Chunks,
    Feedback,
    Options,
    TwoLevels,
)
from fusedcomm.literals import Off, Search, Sum, Wire, WireWithoutScales
from fusedcomm.patterns import ONE_DIMENSIONAL

__all__ = [
    "AUTO",
    "OFF",
    "Off",
    "ONE_DIMENSIONAL",
    "Search",
    "Sum",
    "Wire",
    "WireWithoutScales",
    "SUMS",
    "WIRES",
    "WITHOUT_SCALES",
    "WITH_SCALES",
    "Chunks",
    "Config",
    "Feedback",
    "LocalOptions",
    "Options",
    "TwoLevels",
    "choose_codec_threads",
    "choose_isa",
    "local_options",
]
