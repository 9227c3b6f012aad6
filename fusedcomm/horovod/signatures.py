"""Signatures with the job's key: of the records that decide who takes part, and of all that is unpickled.

`fusedcomm run` makes a key for each job and gives it to its workers alone. A process without it may read and disturb
what goes over the network, but it joins no job, and nothing that it sends is unpickled. A signature is bound to a
purpose, such as a record's name: in another place, or at a later time, it is a wrong one.

Without a key nothing is signed: such a job trusts everybody who reaches its store and its sockets.
"""

import hashlib
import hmac
import json

import fusedcomm.horovod.environment as environment

KEY = "FUSEDCOMM_HOROVOD_KEY"
MIN_KEY_LENGTH = 32
_MARK = b"\0signed\0"
"""The beginning of signed content. Neither JSON nor a pickle begins so."""
_DIGEST_NBYTES = hashlib.sha256().digest_size


class RefusedError(ValueError):
    """The signature is missing or wrong. The text goes after a name: "is not signed with …"."""


def key() -> bytes | None:
    """The job's key; None if there is none. Raises ValueError, without the key, if it is too short."""
    text = environment.text(KEY)
    if text is not None and len(text) < MIN_KEY_LENGTH:
        raise ValueError(
            f"{KEY} has {len(text)} characters: use at least {MIN_KEY_LENGTH} random ones, such as those that `openssl "
            "rand -hex 32` prints, the same on every rank"
        )
    return None if text is None else text.encode()


def signed(content: bytes, *purpose: object) -> bytes:
    """The content behind its signature; the content alone in a job without a key. `purpose`: values that can be JSON.
    Whoever reads the content must name the same purpose."""
    found = key()
    return content if found is None else _MARK + _digest(found, content, purpose) + content


def content_of(data: bytes, *purpose: object) -> bytes:
    """The content that signed() was given. Raises RefusedError."""
    found, begin = key(), len(_MARK) + _DIGEST_NBYTES
    is_signed = data.startswith(_MARK) and len(data) >= begin
    if found is None:
        if is_signed:
            raise RefusedError(
                f"is signed with the job's key, which this process lacks: start it with `fusedcomm run`, which sets "
                f"{KEY}, or set that to the same secret on every rank"
            )
        return data
    if not is_signed:
        raise RefusedError("is not signed with the job's key: it was sent by a process that does not have the key")
    content = data[begin:]
    if not hmac.compare_digest(data[len(_MARK) : begin], _digest(found, content, purpose)):
        raise RefusedError(
            "has a wrong signature: it was sent by a process that does not have the job's key, or is a copy of "
            "something older"
        )
    return content


def derived(text: str, *purpose: object) -> str:
    """A text of the same length that only who has the key can make of `text`, which has at most 64 hexadecimal digits;
    `text` itself in a job without a key."""
    found = key()
    return text if found is None else _digest(found, text.encode(), ("derived", *purpose)).hex()[: len(text)]


def _digest(key: bytes, content: bytes, purpose: tuple[object, ...]) -> bytes:
    # The purpose ends at the zero byte: JSON contains none.
    found = hmac.new(key, json.dumps(purpose).encode() + b"\0", hashlib.sha256)
    found.update(content)
    return found.digest()
