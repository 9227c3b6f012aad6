"""What every command's main catches."""


class UsageError(Exception):
    """The arguments ask for something impossible; the text says what and what to change."""
