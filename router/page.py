"""Page: what the admin listener answers, on its way between the processes of a router, too."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = "application/json"
CHANGE = "POST "
"""What the target of a page begins with that changes something: it is followed by the path and its query."""
CHANGES = frozenset({"/admin/weights", "/admin/cache/clear"})
"""Paths that take POST."""


class Page(msgspec.Struct, frozen=True):
    """An answer. `kind` is its content type."""

    status: int
    kind: str
    body: str


def json_page(body: Any, status: int = 200) -> Page:
    """A page of JSON."""
    return Page(status, JSON, msgspec.json.encode(body).decode())
