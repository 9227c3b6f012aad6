"""Code that commands recommend."""

from fusedcomm.config import Config


def attach_arguments(config: Config) -> str:
    """What to give fusedcomm.attach beside the module."""
    if config == Config(config.wire):
        return f'wire="{config.wire}"'
    return f"fusedcomm.{config!r}".replace("'", '"')
