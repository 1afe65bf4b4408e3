"""What the operator names as public, as tokens of several models' templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from router.options import PublicPrefix
from router.text.chat import Chat
from router.text.public_prefixes import PublicPrefixes, common_length
from router.text.tokenization import Tokenization
from tests.router.text.test_tokenization import FAMILIES, TOOL
from wire.request import NO_MARKS, PromptMarks

SYSTEM = "You are a helpful assistant of the city's library. Answer briefly, and name your sources."


@pytest.fixture(scope="module", params=["qwen", "llama3", "demo"])
def tokenization(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenization:
    return Tokenization(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)))


def chat(system: str, user: str, **more: Any) -> Chat:
    return Chat([{"role": "system", "content": system}, {"role": "user", "content": user}], **more)


@pytest.mark.parametrize(
    "user", ["What is open today?", "  a", "\n", "0", "7", "\u6771\u4eac", "\U0001f642", ".", "<|im_end|>"]
)
def test_every_chat_with_the_system_prompt_begins_with_all_of_it(
    tokenization: Tokenization, user: str
) -> None:
    prefixes = PublicPrefixes(tokenization, [PublicPrefix(text=SYSTEM)])
    (tokens,) = prefixes.tokens
    assert SYSTEM in tokenization.decode(tokens)
    prompt = tokenization.encode_chat(chat(SYSTEM, user))
    assert prefixes.marks(prompt, None) == PromptMarks(len(tokens), len(tokens))
    assert len(tokens) < len(prompt)


def test_another_system_prompt_shares_what_it_begins_with(tokenization: Tokenization) -> None:
    prefixes = PublicPrefixes(tokenization, [PublicPrefix(text=SYSTEM)])
    (tokens,) = prefixes.tokens
    prompt = tokenization.encode_chat(chat(SYSTEM[:40] + " something else altogether", "x"))
    marks = prefixes.marks(prompt, 3)
    assert 0 < marks.public < len(tokens)
    assert tokens[: marks.public] == prompt[: marks.public]
    assert (marks.whole, marks.private_from) == (0, 3)
    with_tools = tokenization.encode_chat(chat(SYSTEM, "x", tools=[TOOL]))
    assert prefixes.marks(with_tools, None).public >= 0


def test_of_several_prefixes_the_longest_counts(tokenization: Tokenization, tmp_path: Path) -> None:
    file = tmp_path / "system.txt"
    file.write_text(f"{SYSTEM} More rules.\n", encoding="utf-8")
    listed = [PublicPrefix(text="Once upon a time", form="prompt"), PublicPrefix(file=file)]
    prefixes = PublicPrefixes(tokenization, listed)
    short, long = prefixes.tokens
    prompt = tokenization.encode_chat(chat(f"{SYSTEM} More rules.", "x"))
    assert prefixes.marks(prompt, None) == PromptMarks(len(long), len(long))
    story = tokenization.encode("Once upon a time there was a pin")
    assert prefixes.marks(story, None) == PromptMarks(len(short), len(short))


def test_a_prompt_that_shares_nothing_has_no_marks(tokenization: Tokenization) -> None:
    prefixes = PublicPrefixes(tokenization, [])
    assert prefixes.marks([1, 2, 3], None) is NO_MARKS
    assert prefixes.marks([1, 2, 3], 0) == PromptMarks(private_from=0)


def test_what_cannot_be_named(tmp_path: Path, tokenization: Tokenization) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    for file in (empty, tmp_path / "none"):
        with pytest.raises(ConfigError, match="public_prefixes"):
            PublicPrefixes(tokenization, [PublicPrefix(file=file)])
    for given in ({}, {"text": "a", "file": empty}):
        with pytest.raises(ValueError, match="either text or file"):
            PublicPrefix(**given)


def test_a_template_that_refuses_system_messages_is_named(tmp_path: Path) -> None:
    path = FAMILIES["qwen"](tmp_path)
    (path / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(ConfigError, match=r"no system messages.*form: prompt"):
        PublicPrefixes(Tokenization(path), [PublicPrefix(text=SYSTEM)])


def test_a_template_that_writes_the_date_is_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FAMILIES["qwen"](tmp_path)
    messages = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    source = "{{ strftime_now('%d %B %Y') }}" + messages
    (path / "chat_template.jinja").write_text(source)
    tokenization = Tokenization(path)
    prefixes = PublicPrefixes(tokenization, [PublicPrefix(text=SYSTEM)])
    later = chat(SYSTEM, "x")
    later.arrived = later.arrived.replace(year=2101)
    prompt = tokenization.encode_chat(later)
    assert prefixes.marks(prompt, None).whole == 0
    _another_day(monkeypatch)
    assert prefixes.marks(prompt, None).whole > len(SYSTEM.split())


def _another_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on it is 2101."""

    class Later(Chat):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.arrived = self.arrived.replace(year=2101)

    class Today:
        @staticmethod
        def today() -> str:
            return "another day"

    monkeypatch.setattr("router.text.public_prefixes.Chat", Later)
    monkeypatch.setattr("router.text.public_prefixes.date", Today)


@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 100])
def test_the_common_length_of_two_lists(size: int) -> None:
    one = list(range(size))
    for same in range(size + 1):
        other = one[:same] + [-1] * 3
        assert common_length(one, other) == common_length(other, one) == same
    assert common_length(one, one) == size
