"""What the demo model is taught: enough functions, in enough words, and never in a held-out phrasing."""

from __future__ import annotations

import os.path

import pytest

from tools.demo_functions import MAX_WORDS, Function, trained_functions
from tools.demo_questions import QuestionMaker
from tools.demo_text import HELD_OUT_PHRASINGS, normal_form, one_line


@pytest.fixture(scope="module")
def functions() -> list[Function]:
    return trained_functions()


def test_at_least_600_functions_are_answered_by_their_docstrings(functions: list[Function]) -> None:
    by_name = {function.name: function for function in functions}
    assert len(by_name) == len(functions) >= 600
    assert one_line(os.path.join.__doc__ or "").startswith(by_name["os.path.join"].answer)
    assert one_line(str.upper.__doc__ or "").startswith(by_name["str.upper"].answer)
    assert all(4 <= len(function.answer.split()) <= MAX_WORDS for function in functions)


def test_owner_and_attribute_divide_the_name() -> None:
    assert (Function("os.path.join", "").owner, Function("os.path.join", "").attribute) == ("os.path", "join")
    assert (Function("len", "").owner, Function("len", "").attribute) == ("", "len")


def test_one_seed_gives_one_stream(functions: list[Function]) -> None:
    def stream(seed: int) -> list[object]:
        maker = QuestionMaker(functions, seed)
        return [maker.conversation(function) for function in functions[:50]]

    assert stream(3) == stream(3)
    assert stream(3) != stream(4)


def test_a_function_is_asked_for_in_many_ways_and_named_each_time(functions: list[Function]) -> None:
    join = next(function for function in functions if function.name == "os.path.join")
    maker = QuestionMaker(functions, 5)
    questions = {maker.question(join) for _ in range(200)}
    assert len({normal_form(question) for question in questions}) >= 20
    assert all("join" in question and "os.path" in question for question in questions)


def test_a_conversation_ends_with_the_answer(functions: list[Function]) -> None:
    maker = QuestionMaker(functions, 6)
    chats = [maker.conversation(functions[0]) for _ in range(100)]
    assert all(chat[-1] == {"role": "assistant", "content": functions[0].answer} for chat in chats)
    assert {len(chat) for chat in chats} >= {2, 3, 4}  # alone, with a system prompt, after another turn


def test_chance_may_not_make_a_held_out_question(
    functions: list[Function], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = QuestionMaker(functions, 7)
    monkeypatch.setattr("tools.demo_questions.TRAINING_PHRASINGS", HELD_OUT_PHRASINGS)
    with pytest.raises(ValueError, match="came up in training"):
        [maker.question(functions[0]) for _ in range(200)]
