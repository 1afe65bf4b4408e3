"""Reasoning between two tags, with which an output begins: `<think>...</think>`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from router.text.output_parts import Reasoning
from router.text.output_source import MOST_SPACE, Reading, Source, accept, skip_space, until


class ReasoningStart(Enum):
    """Where the reasoning of an output begins."""

    OPEN = auto()  # in the prompt
    GOES_ON = auto()  # in the prompt, which has some of it already
    MAY = auto()  # with the output, if it writes the opening tag
    NEVER = auto()  # the prompt has closed it


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags of a family of models."""

    opening: str
    closing: str
    assumed: bool = False  # an output is reasoning from its first character on, unless the prompt closes it
    budget: str = ""  # a tag that a template without time for thoughts writes behind the opening one
    label: str = ""  # a line behind the opening tag, which is no thought

    @property
    def markers(self) -> tuple[str, ...]:
        """Both."""
        return self.opening, self.closing

    def start(self, prompt_end: str, continued: str = "") -> ReasoningStart:
        """Of the output of a prompt: many templates end with one of the tags. `continued`: the text of the
        message with which the output goes on, perhaps in the middle of a thought. The prompt ends with it,
        behind what the template has written."""
        text = continued.strip()
        if self.closing in text:
            return ReasoningStart.NEVER
        if text.startswith(self.opening) and text != self.opening:  # thoughts only begin a message
            return ReasoningStart.GOES_ON
        end = _before(prompt_end, text).rstrip()
        if self.budget:
            end = end.removesuffix(self.budget).rstrip()
        end = end.removesuffix(self.label)
        if text != self.opening and end.endswith(self.closing):
            return ReasoningStart.NEVER
        is_open = self.assumed or end.endswith(self.opening) or text == self.opening
        return ReasoningStart.OPEN if is_open else ReasoningStart.MAY


def read(
    source: Source,
    tags: ReasoningTags,
    start: ReasoningStart,
    then: Callable[[Source], Reading[None]],
    calls: tuple[str, ...] = (),
) -> Reading[None]:
    """Reasoning, if the output begins with its tag or within it, and what `then` reads behind it. `calls`:
    with what calls begin that end it, too."""
    begin = source.taken
    is_open = start in (ReasoningStart.OPEN, ReasoningStart.GOES_ON)
    if start is ReasoningStart.MAY:
        is_open = (yield from _opens(source, tags.opening)) or (yield from _labelled(source, tags))
    if is_open:
        source.thought_bounds.append(begin)
        if start is not ReasoningStart.GOES_ON:
            yield from skip_space(source)
            yield from _opens(source, tags.opening)  # some models write it once more
            yield from _labelled(source, tags)
            yield from skip_space(source)
        _, found = yield from until(source, (tags.closing, *calls), Reasoning)
        if found in calls:
            source.put_back(found)
        source.thought_bounds.append(source.taken)
        if found not in calls:
            yield from skip_space(source, "\n")
    yield from then(source)


def _before(prompt_end: str, text: str) -> str:
    """Without the text at its end. A tokenizer may have normalized the text: then it is not found."""
    before, found, _ = prompt_end.rpartition(text) if text else ("", "", "")
    return before if found else prompt_end


def _labelled(source: Source, tags: ReasoningTags) -> Reading[bool]:
    """Take the line behind the opening tag. Some models forget the tag before it."""
    return bool(tags.label and (yield from accept(source, f"{tags.label}\n")))


def _opens(source: Source, tag: str) -> Reading[bool]:
    """Take the tag, and white space before it, if the text begins with it."""
    while True:
        text = source.text.lstrip()
        if len(source.text) - len(text) > MOST_SPACE:
            return False
        if text.startswith(tag):
            source.take(len(source.text) - len(text) + len(tag))
            return True
        if source.ended or not tag.startswith(text):
            return False
        yield None
