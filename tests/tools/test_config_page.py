"""docs/configuration.md has the keys of a configuration, and each says what it is."""

from __future__ import annotations

from tools.config_page import PAGE, sections, with_tables


def test_the_page_has_every_key() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tools.config_page"


def test_every_key_says_what_it_is() -> None:
    silent = [
        f"{title}.{key}"
        for title, schema in sections().items()
        for key, field in schema["properties"].items()
        if not field.get("description") and "$ref" not in str(field)
    ]
    assert silent == []
