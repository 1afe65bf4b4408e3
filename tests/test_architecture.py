"""docs/architecture.md walks a request and a KV event through the code; each hop names an existing place."""

from __future__ import annotations

import re

import pytest

from tests.test_owner_map import ROOT, missing

PAGE = (ROOT / "docs" / "architecture.md").read_text()
WALKS = ("## One request, hop by hop", "## One KV event, hop by hop")
MOST_HOPS = 25


def hops(title: str) -> list[str]:
    """The places of a walk, in order."""
    section = PAGE.split(title)[1].split("\n## ")[0]
    return re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \|", section, re.MULTILINE)


@pytest.mark.parametrize("title", WALKS)
def test_a_walk_is_short_and_its_places_exist(title: str) -> None:
    places = hops(title)
    assert 8 <= len(places) <= MOST_HOPS
    problems = [why for place in places if (why := missing(place.strip()))]
    assert not problems, "\n".join(problems)


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)[`:]", PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).is_file()] == []


def test_every_link_on_the_page_leads_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).is_file(), target
