"""Between routers."""

from __future__ import annotations

import msgspec

from wire.messages.base import Message
from wire.numbers import Natural


class AssignedLoadRow(msgspec.Struct, frozen=True, array_like=True):
    """What a router has assigned to one worker (router/placement/load_estimate.py: AssignedLoad)."""

    worker: str
    incarnation: Natural
    requests: Natural
    prefills: Natural
    prefill_tokens: Natural
    context_tokens: Natural
    since_tokens: Natural
    promised_tokens: Natural
    promised_rooms: Natural


class AssignedLoads(Message, frozen=True, tag="accounts"):
    """What a router has assigned to workers, in absolute values. Never answered; sent whole once a second.

    `incarnation` is the router's. `number` grows with each of its messages; a row is newer than one with a
    smaller number. `whole`: nothing is assigned to workers that are not listed.
    """

    incarnation: Natural
    number: Natural
    whole: bool
    rows: list[AssignedLoadRow]


class KeepResponse(Message, frozen=True, tag="keep_response"):
    """Keep a copy of an answer of /v1/responses (router/kept_responses.py). Never answered."""

    tenant: str
    response: str  # its id
    content: bytes


class FindResponse(Message, frozen=True, tag="find_response"):
    """Ask for a response. Answered with FoundResponse; `token` is echoed."""

    tenant: str
    response: str
    token: Natural


class FoundResponse(Message, frozen=True, tag="found_response"):
    """Its content; b"": the sender has no such response."""

    token: Natural
    content: bytes


class DropResponse(Message, frozen=True, tag="drop_response"):
    """Forget a response. Never answered."""

    tenant: str
    response: str
