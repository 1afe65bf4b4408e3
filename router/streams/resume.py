"""Resume tokens: what a client repeats, so that any router can go on with its stream (docs/resuming.md).

Every event of a stream has an id `<token>:<positions>`. The token is signed once per stream:

    expires_at  4 bytes   Unix seconds
    first_room  8         the rooms of the request's choices have consecutive numbers from this one on
    seed        8         the router draws one if the body gives none
    length      4         max_new_tokens: depends on the workers if the body gives none
    version     3         of the model's version (placement/version.py): the answer depends on it
    check       2         of the request's digest: tells a changed body from a foreign signature
    signature  16         HMAC-SHA256 of the above and of the digest, its first half (RFC 2104, section 5)

That is 45 bytes, or 60 characters of URL-safe base64. The digest itself is not in it: the client repeats the
request. Where the rooms run is not in it either: rooms move between workers, the choices of one request may
be on several, and workers can be asked (router/streams/claims.py).

The positions are plain text and not signed, because signing each event would cost more than writing it. They
say how many output tokens of each choice the client has. When it has the choice's end, too, an "f" follows,
and how many of the tokens are reasoning, if any is: what has ended is not read again. A client that alters
them receives a part of its own answer twice, or not at all.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import struct
from functools import lru_cache
from typing import NamedTuple, Self

import msgspec
from msgspec.structs import replace

from common.errors import InvalidRequest
from common.secrets import ClusterSecret
from router.options import RouterOptions
from router.streams.generation import Submission

HEADER = "Last-Event-ID"
MOST_CHOICES = 128
"""A stream of more choices has no ids: each id names the positions of all of them."""

_LABEL = b"baton-resume-1"
_CLAIMS = struct.Struct(">IQQI3s2s")
_SIGNATURE = 16  # bytes
_TOKEN_CHARACTERS = (_CLAIMS.size + _SIGNATURE) * 4 // 3
_POSITION = "[0-9]{1,8}(?:f[0-9]{0,8})?"
_EVENT_ID = re.compile(rf"([A-Za-z0-9_-]{{{_TOKEN_CHARACTERS}}}):({_POSITION}(?:\.{_POSITION})*)")
_LONGEST = _TOKEN_CHARACTERS + MOST_CHOICES * 18


class ChoicePosition(NamedTuple):
    """How much of a choice the client has."""

    tokens: int = 0
    finished: bool = False  # it has the choice's end, too
    reasoning_tokens: int = 0  # of a finished choice

    @classmethod
    def read(cls, written: str) -> Self:
        """What `write` has written."""
        tokens, finished, reasoning = written.partition("f")
        return cls(int(tokens), bool(finished), int(reasoning or 0))

    def write(self) -> bytes:
        """As a part of an event's id."""
        if not self.finished:
            return b"%d" % self.tokens
        return b"%df%b" % (self.tokens, b"%d" % self.reasoning_tokens if self.reasoning_tokens else b"")


class Resumption(NamedTuple):
    """A request that a client has repeated, and what it has of the answer."""

    submission: Submission  # with the seed and the length that the first router chose
    first_room: int  # of the stream that was interrupted
    version: bytes  # the tag of the version on which it began
    positions: list[ChoicePosition]


class ResumeTokens:
    """Signs and verifies. Routers with the same key can go on with each other's streams."""

    def __init__(self, options: RouterOptions, secret: ClusterSecret | None) -> None:
        """The key is derived from `resume_key`, or else from the cluster's secret: ids of every accepted one
        are good. With neither it is random, and only this process can go on with its streams."""
        given = options.resume_key
        self._own = _derived((secrets.token_bytes(32) if given is None else given.encode(),))
        self._secret = secret if given is None else None
        self._of_secret = lru_cache(maxsize=1)(_derived)
        self._valid_s = options.resume_valid_s

    def sign(self, submission: Submission, form: str, version: bytes, now: float) -> str:
        """The token of a stream. `form` names the kind of its events, `version` is the tag of its version,
        `now` is Unix time."""
        digest = self._digest(submission, form)
        sampling = submission.sampling
        expires_at = int(now + self._valid_s)
        signed = _CLAIMS.pack(
            expires_at, submission.first_room, sampling.seed, sampling.max_new_tokens, version, digest[:2]
        )
        return base64.urlsafe_b64encode(signed + _signature(self._keys()[0], signed, digest)).decode()

    def open(self, event_id: str, submission: Submission, form: str, now: float) -> Resumption:
        """What `event_id` says about the request that came with it.

        Raises InvalidRequest when the id was not made for this request and by this cluster, or has expired.
        The stream that it belongs to is not affected.
        """
        parts = _EVENT_ID.fullmatch(event_id) if len(event_id) <= _LONGEST else None
        if parts is None:
            raise InvalidRequest("this is not an event id of a stream of this API", HEADER)
        token = base64.urlsafe_b64decode(parts[1])
        signed, signature = token[: _CLAIMS.size], token[_CLAIMS.size :]
        expires_at, first_room, seed, length, version, check = _CLAIMS.unpack(signed)
        resumed = _as_first_submitted(submission, seed, length)
        digest = self._digest(resumed, form)
        if not hmac.compare_digest(check, digest[:2]):
            raise InvalidRequest(
                "this id belongs to another request: repeat the body and the headers exactly", HEADER
            )
        if not any(hmac.compare_digest(signature, _signature(key, signed, digest)) for key in self._keys()):
            raise InvalidRequest(
                "this id was altered, or signed by a router with another key; without the header the request "
                "is served from its beginning",
                HEADER,
            )
        if now >= expires_at:
            raise InvalidRequest(
                "this id has expired; without the header the request is served from its beginning", HEADER
            )
        positions = [ChoicePosition.read(part) for part in parts[2].split(".")]
        if len(positions) != submission.choice_count:
            raise InvalidRequest(f"this id does not name {submission.choice_count} positions", HEADER)
        return Resumption(resumed, first_room, version, positions)

    def _keys(self) -> tuple[bytes, ...]:
        """The first one signs. The cluster's secret may have been replaced since the last call."""
        return self._own if self._secret is None else self._of_secret(self._secret.accepted)

    def _digest(self, submission: Submission, form: str) -> bytes:
        """Of everything that decides what the stream says, and who asks."""
        s = submission
        decides = (
            form, s.model, s.prompts, s.n, s.sampling, s.stop, s.skip_special_tokens, s.extra_key,
            s.cache_salt, s.tenant, s.keep_stop, sorted(s.kept_special),
        )  # fmt: skip
        return hashlib.sha256(msgspec.msgpack.encode(decides)).digest()


def _as_first_submitted(submission: Submission, seed: int, length: int) -> Submission:
    """With what the first router chose where the body leaves it open."""
    sampling = submission.sampling
    return replace(
        submission,
        sampling=replace(
            sampling,
            seed=sampling.seed if submission.seed_given else seed,
            max_new_tokens=sampling.max_new_tokens if submission.length_given else length,
        ),
    )


def _derived(shared: tuple[bytes, ...]) -> tuple[bytes, ...]:
    return tuple(_hmac(secret, _LABEL) for secret in shared)


def _signature(key: bytes, signed: bytes, digest: bytes) -> bytes:
    return _hmac(key, signed + digest)[:_SIGNATURE]


def _hmac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")
