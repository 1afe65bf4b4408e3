"""Page: what the admin listener answers, on its way between the processes of a router, too."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = "application/json"
CHANGES = frozenset({"/admin/weights"})
"""Paths that change something. They take POST only, and each process of a router must do it."""


class Page(msgspec.Struct, frozen=True):
    """An answer. `kind` is its content type."""

    status: int
    kind: str
    body: str


def json_page(body: Any, status: int = 200) -> Page:
    """A page of JSON."""
    return Page(status, JSON, msgspec.json.encode(body).decode())
