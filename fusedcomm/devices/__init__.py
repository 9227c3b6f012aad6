"""The devices that codecs run on: one file for each kind, and what compiles the kernels of GPUs."""
