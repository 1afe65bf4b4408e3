"""How items that consist of text are told of, whole and by events."""

from __future__ import annotations

from typing import Any, NamedTuple


class TextForm(NamedTuple):
    """One kind of item. Its text is one part, in one of its fields."""

    item: str
    id_prefix: str
    field: str
    place: str  # what events call the place of the part in its field
    part: str
    part_events: str
    text_events: str
    fields: dict[str, Any]  # of a new item
    beside_text: dict[str, Any]  # of events of its text, and of the part
    beside_part: dict[str, Any]

    def made_part(self, text: str) -> dict[str, Any]:
        """The part."""
        return {"type": self.part, "text": text, **self.beside_part, **self.beside_text}


_CONTENT = "content", "content_index"

MESSAGE = TextForm(
    "message", "msg_", *_CONTENT, "output_text", "response.content_part", "response.output_text",
    {"role": "assistant", "content": []}, {"logprobs": []}, {"annotations": []},
)  # fmt: skip
REASONING = TextForm(
    "reasoning", "rs_", *_CONTENT, "reasoning_text", "response.content_part", "response.reasoning_text",
    {"summary": [], "content": []}, {}, {},
)  # fmt: skip
SUMMARY = TextForm(
    "reasoning", "rs_", "summary", "summary_index", "summary_text", "response.reasoning_summary_part",
    "response.reasoning_summary_text", {"summary": []}, {}, {},
)  # fmt: skip
"""Reasoning as most clients show it: they ask for a summary, and know no other text."""
