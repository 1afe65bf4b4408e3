"""OutputItems: from the parts of an answer to the items of a response, and the events that tell of them."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from router.api.openai.responses.text_forms import MESSAGE, REASONING, TextForm
from router.text.output_parts import CallArguments, CallBroken, CallStart, Content, Part, Reasoning

Event = dict[str, Any]
Score = dict[str, Any]
"""A token's log-probability, and the best ones', as in a chat."""


_ARGUMENTS = "response.function_call_arguments"
_RESPONSE = "resp_"


def new_response_id() -> str:
    """Unguessable: without API keys, whoever knows an id finds what is kept under it."""
    return _RESPONSE + secrets.token_hex(16)


def response_of(item_id: str) -> str:
    """The id of the response that an item is of, by the item's id."""
    return _RESPONSE + item_id.partition("_")[2].partition("_")[0]


class OutputItems:
    """The items of one answer. One of them grows at a time. Events are told without their numbers."""

    def __init__(self, response_id: str, reasoning: TextForm = REASONING) -> None:
        self._of = response_id.removeprefix(_RESPONSE)
        self._reasoning = reasoning
        self.items: list[dict[str, Any]] = []  # the last one may be unfinished
        self._broken: list[dict[str, Any]] = []  # calls among them that are none
        self._grows = False  # the last item
        self._form: TextForm | None = None  # of the last item; None: a call
        self._texts: list[str] = []  # that it consists of so far
        self._scores: list[Score] = []  # of the tokens of a message's text
        self._unsaid: list[Score] = []  # of tokens whose text has not come yet
        self._latest: Sequence[Score] = ()  # of the tokens of the parts that are added now

    @property
    def whole(self) -> list[dict[str, Any]]:
        """The items without broken calls, which are part of the text that follows them. In a stream these
        have been told of already."""
        return [item for item in self.items if item not in self._broken]

    def add(self, parts: Iterable[Part], breaks_off: bool, scores: Sequence[Score] = ()) -> Iterator[Event]:
        """Add what follows. Take all events: an item grows with them. `breaks_off`: the output was too long,
        so a call that breaks off is an incomplete one, and no text. `scores`: the log-probabilities of the
        tokens that the parts come from. Only those of a message's text are told."""
        self._latest = scores
        self._unsaid += scores
        for part in parts:
            if not isinstance(part, Content):
                self._unsaid = []
            match part:
                case Reasoning(text):
                    yield from self._grow(self._reasoning, text)
                case Content(text):
                    yield from self._grow(MESSAGE, text)
                case CallStart(_, call_id, name):
                    yield from self.close()
                    call = {"call_id": call_id, "name": name, "arguments": ""}
                    yield self._begin(None, {"id": self._id("fc_"), "type": "function_call", **call})
                case CallArguments(_, text):
                    self._texts.append(text)
                    yield self._event(f"{_ARGUMENTS}.delta", delta=text)
                case CallBroken(_, text):
                    broken = self.items[-1]
                    yield from self.close("incomplete")
                    if not breaks_off:
                        self._broken.append(broken)
                        yield from self._grow(MESSAGE, text)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Nothing is added to the item that grows, if one does."""
        if not self._grows:
            return
        item, text, form = self.items[-1], "".join(self._texts), self._form
        item["status"] = status
        if form is None:
            item["arguments"] = text
            yield self._event(f"{_ARGUMENTS}.done", name=item["name"], arguments=text)
        else:
            beside = form.beside_text | self._said_scores(form)
            if form is MESSAGE:
                beside["logprobs"] = self._scores
            part = form.made_part(text) | beside
            item[form.field] = [part]
            yield self._part_event(form, f"{form.text_events}.done", **beside, text=text)
            yield self._part_event(form, f"{form.part_events}.done", part=part)
        self._grows, self._texts, self._scores = False, [], []
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _grow(self, form: TextForm, text: str) -> Iterator[Event]:
        if not self._grows or self._form is not form:
            yield from self.close()
            if self.items:  # tokens between two items are of neither
                self._unsaid = list(self._latest)
            yield self._begin(form, {"id": self._id(form.id_prefix), "type": form.item, **form.fields})
            yield self._part_event(form, f"{form.part_events}.added", part=form.made_part(""))
        self._texts.append(text)
        beside = form.beside_text | self._said_scores(form)
        yield self._part_event(form, f"{form.text_events}.delta", **beside, delta=text)

    def _said_scores(self, form: TextForm) -> dict[str, Any]:
        """What an event tells of the tokens that have come."""
        scores, self._unsaid = self._unsaid, []
        if form is not MESSAGE:
            return {}
        self._scores += scores
        return {"logprobs": scores}

    def _id(self, prefix: str) -> str:
        """Of the next item: it says which response it is of, and so where it is kept."""
        return f"{prefix}{self._of}_{len(self.items)}"

    def _begin(self, form: TextForm | None, item: dict[str, Any]) -> Event:
        self.items.append({**item, "status": "in_progress"})
        self._grows, self._form = True, form
        told = {"output_index": len(self.items) - 1, "item": dict(self.items[-1])}
        return {"type": "response.output_item.added", **told}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self.items[-1]["id"], "output_index": len(self.items) - 1, **fields}

    def _part_event(self, form: TextForm, kind: str, **fields: Any) -> Event:
        return self._event(kind, **{form.place: 0}, **fields)
