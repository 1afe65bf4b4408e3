"""Sentences, normal forms, and the wall between training and held-out phrasings."""

from __future__ import annotations

import pytest

from tools.demo_text import (
    HELD_OUT_PHRASINGS,
    TRAINING_PHRASINGS,
    check_held_out,
    draw_functions,
    first_sentence,
    normal_form,
    sentences,
)


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("Join two paths.  If one is absolute,\n  the rest is dropped.", "Join two paths."),
        ("Return True, e.g. for 'x.y'. Else False.", "Return True, e.g. for 'x.y'."),
        ("Use os.path.join for this", "Use os.path.join for this"),
        ("Is it so? Yes.", "Is it so?"),
        ("", ""),
    ],
)
def test_the_first_sentence_ends_where_a_new_one_begins(text: str, first: str) -> None:
    assert first_sentence(text) == first


def test_sentences_lose_nothing_but_white_space() -> None:
    text = "One. Two, etc. and so on!  Three\nwithout a stop"
    assert " ".join(sentences(text)) == "One. Two, etc. and so on! Three without a stop"


def test_case_and_punctuation_make_no_new_phrasing() -> None:
    assert normal_form("What does `{name}` do?!") == normal_form("what does {name} do")


def test_no_held_out_phrasing_is_trained() -> None:
    check_held_out(TRAINING_PHRASINGS, HELD_OUT_PHRASINGS)
    assert len(TRAINING_PHRASINGS) >= 6
    assert len(HELD_OUT_PHRASINGS) == 3


@pytest.mark.parametrize(
    "leak",
    [
        "what does {name} do",
        "Hello! What does `{name}` do? Thanks.",
        "does {name}",
    ],
)
def test_a_held_out_phrasing_that_is_trained_is_refused(leak: str) -> None:
    with pytest.raises(ValueError, match="occurs in training"):
        check_held_out(("Tell me of {name}.", "What does {name} do?"), (leak,))


def test_the_draw_depends_on_names_and_seed_only() -> None:
    names = [f"f{number}" for number in range(100)]
    assert draw_functions(names, 1, 10) == draw_functions(reversed(names), 1, 10)
    assert draw_functions(names, 1, 10) != draw_functions(names, 2, 10)
