"""``python -m fusedcomm`` runs the ``fusedcomm`` command, also from a checkout that is not installed."""

from fusedcomm.tools.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
