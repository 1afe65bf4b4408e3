from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

_text = st.text(alphabet="abX", max_size=30)


def whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The plain definition: cut at the earliest stop."""
    found = [text.find(stop) for stop in stops if stop in text]
    return (text[: min(found)], True) if found else (text, False)


@given(
    pieces=st.lists(_text, max_size=12),
    stops=st.lists(st.text("abX", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_borders_between_pieces_do_not_matter_much(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(tuple(stops))
    shown, hit = "", None
    consumed = ""
    for piece in pieces:
        consumed += piece
        more, hit = finder.push(piece)
        shown += more
        if hit is not None:
            break
    else:
        shown += finder.flush()
    want, stopped = whole(consumed, stops)
    assert (shown, hit is not None) == (want, stopped)


def test_a_partial_match_is_held_back_and_given_out_when_it_comes_to_nothing() -> None:
    finder = StopStrings(("END",))
    assert finder.push("the E") == ("the ", None)
    assert finder.push("N") == ("", None)
    assert finder.push("x") == ("ENx", None)
    assert finder.push("EN") == ("", None)
    assert finder.push("D more") == ("", "END")


def test_a_stop_string_may_begin_in_text_that_was_passed_by() -> None:
    finder = StopStrings(("END",))
    assert finder.pass_by("the END EN") == "the END "
    assert finder.push("D") == ("", "END")
    assert finder.pass_by("EN") == ""
    assert finder.pass_by("D") == "END"
    assert finder.push("D") == ("D", None)


def test_the_text_that_looked_like_a_stop_comes_at_the_end() -> None:
    finder = StopStrings(("\n\n",))
    assert finder.push("a\n") == ("a", None)
    assert finder.flush() == "\n"
    assert finder.flush() == ""
