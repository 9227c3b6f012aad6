"""How a wire, or a whole configuration, is named in a request: every rank can read it, also one that has not made the
request itself."""

import dataclasses
import json

from fusedcomm.config import WIRES, Blocks, Chunks, Config, Feedback, TwoLevels, check

_GROUPS = {"blocks": Blocks, "feedback": Feedback, "chunks": Chunks}


def text_of(config: Config) -> str:
    """The name of the wire, if nothing else differs from the defaults; else JSON.

    Raises:
        ValueError: `config` is no Config, measures errors of backward passes, or has feedback of reduce-scatters.
    """
    check.kind("config", config, Config)
    for name in ("measure_every", "compare_every", "compare"):
        if getattr(config, name) != getattr(Config(), name):
            raise ValueError(
                f"{name}={getattr(config, name)!r} is not possible here: operations come one by one, and belong to no "
                "backward pass. Leave it out, or use fusedcomm.GradReducer"
            )
    config.refuse_unsharded()
    defaults = dataclasses.asdict(Config())
    fields = {name: value for name, value in dataclasses.asdict(config).items() if value != defaults[name]}
    fields.pop("wire", None)
    # The order of patterns matters: the first that matches counts.
    return json.dumps({"wire": config.wire, **fields}) if fields else config.wire


def config_of(text: str) -> Config:
    """The configuration that :func:`text_of` has named, without measurements. Raises ValueError for another text."""
    if text in WIRES:
        fields = {"wire": text}
    else:
        try:
            fields = json.loads(text)
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise ValueError(f"{text!r} names no wire: use one of {', '.join(map(repr, WIRES))}")
    for name, group in _GROUPS.items():
        if fields.get(name) is not None:
            fields[name] = group(**fields[name])
    if isinstance(fields.get("hosts"), dict):
        fields["hosts"] = TwoLevels(**fields["hosts"])
    return Config(**fields, measure_every=0)
