"""Device code, imported as ``fusedcomm.kernels``: one file for each operation, its launcher under its kernel.

Nothing here imports Triton until a file is asked for, and only bucket.py needs the compiled extension.
"""
