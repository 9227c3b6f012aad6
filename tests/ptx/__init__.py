"""Executes kernels from their PTX in numpy: every thread of a grid is an element of an array.

parse.py reads the text, arithmetic.py and floats.py compute, memory.py loads, stores and finds races, grid.py runs a
launch.
"""

from .grid import launch
from .memory import HostMemory, TensorMemory
from .parse import Fault, Unsupported, parse

__all__ = ["Fault", "HostMemory", "TensorMemory", "Unsupported", "launch", "parse"]
