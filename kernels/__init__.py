"""Device code, imported as ``fusedcomm.kernels``: one file per operation, with the launcher below its kernel.

Importing the package imports none of its files. variants.py and bucket.py work without Triton.
"""
