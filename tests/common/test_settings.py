"""Dotted settings."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from common.settings import assign


def test_sections_are_made_and_values_are_yaml() -> None:
    settings: dict[str, Any] = {"worker": None, "decode": {"drain_s": 1}}
    for assignment in (
        "worker.page_size=32",
        "decode.drain_s=2.5",
        "worker.events={enable: false}",
        "name=a=b",
        "router.options.request_log=-",
    ):
        assign(settings, assignment)
    assert settings == {
        "worker": {"page_size": 32, "events": {"enable": False}},
        "decode": {"drain_s": 2.5},
        "name": "a=b",
        "router": {"options": {"request_log": "-"}},
    }


@pytest.mark.parametrize(
    ("assignment", "key", "problem"),
    [
        ("page_size", "--set", "'page_size' is not KEY=VALUE"),
        ("=3", "--set", "'=3' is not KEY=VALUE"),
        ("page_size=[1", "page_size", "'[1' is not YAML"),
        ("model.name=x", "model.name", "model is not a section"),
    ],
)
def test_refusals_name_the_key(assignment: str, key: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        assign({"model": "m"}, assignment)
    assert caught.value.key == key
    assert caught.value.problem.startswith(problem)
