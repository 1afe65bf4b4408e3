"""The dashboard's files.

They say nothing of this Baton, so they are served without a key. What they read from the listener is not.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from router.page import Page

_KINDS = {
    "index.html": "text/html; charset=utf-8",
    "dashboard.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "dashboard.css": "text/css; charset=utf-8",
}
_PATHS = {"/": "index.html", **{f"/{name}": name for name in _KINDS if name != "index.html"}}
POLICY = (
    b"content-security-policy",
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src *; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
)
"""The header of these pages (https://www.w3.org/TR/CSP3/). `connect-src *`: the playground asks the API,
whose address the user gives."""


def find_asset(path: str) -> Page | None:
    """The file at a path of the listener."""
    name = _PATHS.get(path)
    return None if name is None else _read(name)


@cache
def _read(name: str) -> Page:
    return Page(200, _KINDS[name], files(__package__).joinpath(name).read_text())
