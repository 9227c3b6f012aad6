"""FSDP2 as a front end: its reduce-scatters in fusedcomm's wires."""
