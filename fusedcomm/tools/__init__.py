"""The ``fusedcomm`` command and everything behind it. No module that training uses imports this package."""
