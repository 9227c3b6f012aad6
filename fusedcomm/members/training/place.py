"""A rank's place in the data: its share of a step, and what a checkpoint has of it."""


def check_state(state: object, keys: set[str], whose: str) -> None:
    """Raises ValueError unless `state` is a dict with these keys, of whole numbers from 0 on."""
    if not isinstance(state, dict) or set(state) != keys:
        found = sorted(map(str, state)) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise ValueError(f"fusedcomm: this is no state of {whose}: expected {sorted(keys)}, found {found}")
    for key, value in state.items():
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"fusedcomm: state[{key!r}] of {whose} is {value!r}: it must be a whole number, 0 or more")


def share_of(total: int, rank: int, size: int) -> tuple[int, int]:
    """(first, count) of rank `rank` among `total` pieces: the first ranks have one more if they cannot be divided."""
    count, more = divmod(total, size)
    return rank * count + min(rank, more), count + (rank < more)
