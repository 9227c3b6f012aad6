"""fusedcomm in trainers: one module for each, which imports its trainer. This package imports none."""
