"""Traces of the engine's stages: recorded, written, merged over ranks."""
