"""OutputItems: from the text of an answer to the items of a response, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

Event = dict[str, Any]


class _Form(NamedTuple):
    """How an item of text is told of."""

    id_prefix: str
    part: str
    events: str


_FORMS = {
    "message": _Form("msg_", "output_text", "response.output_text"),
}


def new_id(prefix: str) -> str:
    """Unguessable: without API keys, whoever knows an id finds what is kept under it."""
    return prefix + secrets.token_hex(16)


class OutputItems:
    """The items of one answer. One of them grows at a time. Events are told without their numbers."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []  # the last one may be unfinished
        self._growing = ""  # the type of the item that grows
        self._texts: list[str] = []  # that it consists of so far

    def add(self, text: str) -> Iterator[Event]:
        """Add what follows. Take all events: an item grows with them."""
        if text:
            yield from self._grow("message", text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Nothing is added to the item that grows, if one does."""
        if not self._growing:
            return
        item, text, form = self.items[-1], "".join(self._texts), _FORMS[self._growing]
        part = _part(form, text)
        item["status"], item["content"] = status, [part]
        yield self._part_event(f"{form.events}.done", **_beside_text(form), text=text)
        yield self._part_event("response.content_part.done", part=part)
        self._growing, self._texts = "", []
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _grow(self, kind: str, text: str) -> Iterator[Event]:
        form = _FORMS[kind]
        if self._growing != kind:
            yield from self.close()
            new = {"id": new_id(form.id_prefix), "type": kind, "role": "assistant", "content": []}
            yield self._begin(new)
            yield self._part_event("response.content_part.added", part=_part(form, ""))
        self._texts.append(text)
        yield self._part_event(f"{form.events}.delta", **_beside_text(form), delta=text)

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append({**item, "status": "in_progress"})
        self._growing = item["type"]
        told = {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        return {"type": "response.output_item.added", **told}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _part_event(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, content_index=0, **fields)


def _part(form: _Form, text: str) -> dict[str, Any]:
    return {"type": form.part, "text": text, "annotations": [], **_beside_text(form)}


def _beside_text(form: _Form) -> dict[str, Any]:
    """What OpenAI's texts have, and reasoning has not."""
    return {"logprobs": []} if form.part == "output_text" else {}
