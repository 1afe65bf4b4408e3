"""Server-sent events as a client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

DONE = "[DONE]"


class SseEvent(NamedTuple):
    """One event. `id` is the last one that the stream has set, "" before the first."""

    data: str
    id: str = ""
    kind: str = ""

    @property
    def json(self) -> Any:
        """The data, decoded."""
        return json.loads(self.data)


def sse_events(lines: Iterable[str]) -> Iterator[SseEvent]:
    """The complete events among a stream's lines. One that breaks off is left out; comments are skipped."""
    fields: dict[str, str] = {}
    last_id = ""
    for line in lines:
        if line:
            name, _, value = line.partition(":")
            fields[name] = value.removeprefix(" ")
            continue
        last_id = fields.get("id", last_id)
        if "data" in fields:
            yield SseEvent(fields["data"], last_id, fields.get("event", ""))
        fields = {}
