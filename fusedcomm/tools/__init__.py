"""The ``fusedcomm`` command and all that serves it. Nothing that training imports imports this."""
