"""The error that the main function catches for every command."""


class UsageError(Exception):
    """The arguments ask for something impossible. The text says what it is, and what to change."""
