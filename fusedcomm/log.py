"""Reports to the user, through ``logging.getLogger("fusedcomm")``: plans, and what takes a while.

The logging HOWTO asks libraries to add no handlers, because how records are shown is the application's choice. So
fusedcomm adds none and sets no level. As long as the user has configured no handler, for the logger or the root, a
report would be seen nowhere: it is then printed to stdout as it is, which is where a user at a terminal looks for it. A
handler of the user's, also a ``NullHandler``, takes the place of this print. Reports have the level INFO, and DEBUG
where the user asks for quiet.

Warnings go through the ``warnings`` module, which gives each once and which tests can make errors;
``logging.captureWarnings(True)`` hands them to handlers, too. Commands print their own output.
"""

import contextlib
import logging
from collections.abc import Callable

LOGGER = logging.getLogger("fusedcomm")


def report(text: Callable[[], object], quiet: bool = False) -> None:
    """Reports what `text` returns, which is called only if somebody sees it.

    Never raises: an error in `text`, a closed pipe or a missing encoding must not stop this rank alone.
    """
    level = logging.DEBUG if quiet else logging.INFO
    with contextlib.suppress(Exception):
        if LOGGER.hasHandlers():
            if LOGGER.isEnabledFor(level):
                LOGGER.log(level, "%s", text())
        elif level >= (LOGGER.level or logging.INFO):
            print(text(), flush=True)
