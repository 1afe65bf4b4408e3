"""JSON for the data of server-sent events."""

from __future__ import annotations

from typing import Any

import msgspec

_LINE_ENDS = {"\x85": rb"\u0085", "\u2028": rb"\u2028", "\u2029": rb"\u2029"}
"""Characters that JSON leaves as they are and Python's str.splitlines, thus httpx's iter_lines, takes for the
end of a line. To server-sent events they are characters like others; clients that split so lose the event."""
_ESCAPED = {character.encode(): escaped for character, escaped in _LINE_ENDS.items()}


def encode_event(value: Any) -> bytes:
    """JSON in one line, however the client splits lines."""
    encoded = msgspec.json.encode(value)
    if not encoded.isascii():
        for character, escaped in _ESCAPED.items():
            encoded = encoded.replace(character, escaped)
    return encoded
