"""The code that commands recommend."""

from fusedcomm.config import Config


def attach_arguments(config: Config) -> str:
    """The arguments of fusedcomm.attach after the module, as source text. Never empty."""
    if config == Config(config.wire):
        return f'"{config.wire}"'
    return f"fusedcomm.{config!r}".replace("'", '"')
