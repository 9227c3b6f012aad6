"""Old keywords and the new place of each. There are no aliases: a call with one is an error."""

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NEW_PLACE = {
    "sum": "Config(sum=…)",
    "exempt": "Config(wires={pattern: 'fp32'}); for exempt=(), Config(wire, wires={'1d': wire})",
    "wire_for": "Config(wires={pattern: wire})",
    "predivide": "Config(predivide=…)",
    "block": "Config(blocks=Blocks(numel=…))",
    "rotate": "Config(blocks=Blocks(rotate=True))",
    "rounding": "Config(rounding=Rounding('stochastic'))",
    "seed": "Config(rounding=Rounding('stochastic', seed=…))",
    "error_feedback": "Config(feedback=Feedback('fp32'))",
    "chunk_nbytes": "Config(chunks=Chunks(nbytes=…))",
    "chunks_in_flight": "Config(chunks=Chunks(in_flight=…))",
    "verify_every": "Config(checks=Checks(verify_every=…))",
    "measure_every": "Config(checks=Checks(measure_every=…))",
    "fallback_error": "Config(checks=Checks(verify_every=…, fallback=Fallback(error=…)))",
    "fallback_wire": "Config(checks=Checks(verify_every=…, fallback=Fallback(error=…, wire=…)))",
    "hosts": "Config(hosts=…)",
    "local_wire": "Config(hosts=TwoLevels(groups=…, local_wire=…))",
    "wires": "Auto(wires=…) instead of wire='auto'; options that are not searched go into its base=Config(…)",
    "tuned": "Auto(tuned=…) instead of wire='auto'; options that are not searched go into its base=Config(…)",
    "isa": "local=LocalOptions(isa=…)",
    "codec_threads": "local=LocalOptions(codec_threads=…)",
    "sm_limit": "local=LocalOptions(sm_limit=…)",
    "stall_after": "local=LocalOptions(stall_after=…)",
}
"""The new place of each old keyword, in words."""


def explains_moved(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a function that took these keywords: a call with one raises TypeError, which names the new place.

    name: the function's public name, for the error.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        own = inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            moved = [keyword for keyword in kwargs if keyword in NEW_PLACE and keyword not in own]
            if moved:
                places = "; ".join(f"{keyword}= is {NEW_PLACE[keyword]}" for keyword in moved)
                raise TypeError(f"{name}() has other keywords since fusedcomm 0.2: {places}")
            return function(*args, **kwargs)

        return call

    return decorated
