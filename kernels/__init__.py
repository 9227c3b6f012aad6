"""Device code, imported as ``fusedcomm.kernels``: one file per operation.

Importing the package imports none of its files. variants.py works without Triton.
"""
