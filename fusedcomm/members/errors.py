"""What the control plane of members raises."""


class FrameError(RuntimeError):
    """Bytes that are no frame, or a frame that has changed on its way."""


class MinorityError(RuntimeError):
    """Too many members are silent: the others may be training on, so this process stops."""


class TooFewRanksError(RuntimeError):
    """Fewer than `min_ranks` members are left."""


class ExpelledError(RuntimeError):
    """The other members go on in a view that this process is not in."""


class JoinRefusedError(RuntimeError):
    """A process that wants to join was refused; the text has the members' reason."""


class MemberLostError(RuntimeError):
    """The member that was asked is dead, silent or no longer a member."""


class DamagedError(RuntimeError):
    """This rank's parameters are not those of most ranks, or none are those of most."""


class InstallTimeoutError(RuntimeError):
    """Some members of a committed view were not ready for it in time."""
