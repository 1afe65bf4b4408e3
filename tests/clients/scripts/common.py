"""What the scripts of several clients ask.

Standard library only: each client has an environment of its own.
"""

from __future__ import annotations

import json
import os
from typing import Any

URL = os.environ["BATON_URL"]  # http://HOST:PORT
MODEL = os.environ["BATON_MODEL"]
TRAINED = os.environ["BATON_TRAINED"] == "1"  # the demo model; else a random one
QUESTION = "What does os.path.join do?"
TOKENS = 48
LONG = 1000  # for what a grammar ends: a random model makes much white space

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
"""Bounded, so that a random model's arguments end."""

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather of a city.", "parameters": WEATHER},
}


def check_text(text: str | None) -> None:
    """The demo model knows the answer; a random model says anything."""
    assert isinstance(text, str), text
    if TRAINED:
        assert "pathname components" in text, text
    else:
        assert text


def check_weather(arguments: str | dict[str, Any]) -> None:
    """Arguments of the tool, or an object of its schema."""
    found = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert found.keys() == {"city", "days"}, found
    assert found["city"] in ("Bern", "Rome", "Oslo"), found
    assert 1 <= found["days"] <= 9, found
