"""Device code, imported as ``fusedcomm.kernels``. Empty so far: it arrives with the GPU path."""
