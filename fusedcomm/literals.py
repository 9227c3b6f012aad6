"""The values that options take by name, as types. A type checker finds a wrong one before the program runs.

tests/config/test_literals.py compares them with the names that the engine has. Loads no torch.
"""

from typing import Literal, TypeAlias

Wire: TypeAlias = Literal["fp32", "bf16", "fp16", "int8", "fp8", "int4"]
WireWithoutScales: TypeAlias = Literal["fp32", "bf16", "fp16"]
Search: TypeAlias = Literal["auto"]
"""In place of a wire: search for one."""
Off: TypeAlias = Literal["off"]
"""In place of a wire: DDP's own all-reduce."""
Sum: TypeAlias = Literal["auto", "exact", "direct", "two-shot", "one-shot"]
Weighted: TypeAlias = Literal["mean", "sum"]
Compare: TypeAlias = Literal["warn", "raise"]
