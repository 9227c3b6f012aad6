"""A checkpoint as the bytes of its file."""

import io

import torch


def file_of(state: object) -> bytes:
    torch.save(state, file := io.BytesIO())
    return file.getvalue()


def read(file: bytes, weights_only: bool = False) -> object:
    return torch.load(io.BytesIO(file), weights_only=weights_only)
