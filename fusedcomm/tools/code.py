"""The code that commands recommend."""

import dataclasses

from fusedcomm.config import Config


def attach_arguments(config: Config) -> str:
    """The arguments of fusedcomm.attach after the module, as source text. Never empty."""
    if dataclasses.replace(config, wire=Config().wire) == Config():
        return f'"{config.wire}"'
    return f"fusedcomm.{config!r}".replace("'", '"')
