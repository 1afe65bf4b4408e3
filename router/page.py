"""Page: what the admin listener answers, on its way between the processes of a router, too."""

from __future__ import annotations

from typing import Any

import msgspec

JSON = "application/json"
CHANGE = "POST "
"""What the target of a page begins with that changes something: it is followed by the path and its query."""
CHANGES = frozenset({"/admin/weights", "/admin/cache/clear", "/admin/requests/abort"})
"""Paths that take POST; so do those of `forgotten_tenant`."""
_TENANT, _FORGET = "/admin/tenants/", "/forget"


def forgotten_tenant(path: str) -> str | None:
    """NAME of /admin/tenants/NAME/forget; None for any other path."""
    if path.startswith(_TENANT) and path.endswith(_FORGET) and len(path) > len(_TENANT + _FORGET):
        return path[len(_TENANT) : -len(_FORGET)]
    return None


class Page(msgspec.Struct, frozen=True):
    """An answer. `kind` is its content type."""

    status: int
    kind: str
    body: str


def json_page(body: Any, status: int = 200) -> Page:
    """A page of JSON."""
    return Page(status, JSON, msgspec.json.encode(body).decode())
