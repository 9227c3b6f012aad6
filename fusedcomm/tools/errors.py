"""The errors of the commands. Loads no torch."""


class UsageError(Exception):
    """The arguments ask for something impossible. The text says what it is, and what to change. The main function
    prints it."""


class ProbeError(RuntimeError):
    """An error of ``fusedcomm probe`` that the user can fix. The text says what was seen, and what to change."""


class ScriptError(ProbeError):
    """The user's script failed on this rank. The text says where. Other ranks may be waiting for this one."""
