"""Which unit tests `make quick` runs for a change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.quick import everything, folders_for, room_of
from tools.shipped import ROOT


@pytest.mark.parametrize(
    ("file", "room"),
    [
        ("kvcache/components/state.py", "kvcache"),
        ("router/text/detokenize.py", "router/text"),
        ("router/service.py", "router"),
        ("tests/router/text/test_detokenize.py", "router/text"),
        ("tests/worker/test_rooms.py", "worker"),
        ("README.md", ""),
    ],
)
def test_a_file_belongs_to_a_room(file: str, room: str) -> None:
    assert room_of(file) == room


def test_direct_importers_are_tested_too() -> None:
    found = folders_for(["kvtransfer/rooms.py"])
    assert {"tests/kvtransfer", "tests/prefill_node"} <= set(found)
    assert not {"tests/kvcache", "tests/router", "tests/cluster"} & set(found)


def test_a_test_file_alone_runs_its_room() -> None:
    assert "tests/kvtransfer" in folders_for(["tests/kvtransfer/test_rooms.py"])


def test_a_wing_of_the_router_does_not_run_the_others() -> None:
    found = folders_for(["router/text/detokenize.py"])
    assert "tests/router/text" in found
    assert "tests/router/events" not in found
    assert "tests/router/test_metrics.py" in found  # the router's own files import the wing


def test_what_all_tests_share_runs_all_of_them() -> None:
    for shared in ("tests/support/driver.py", "requirements.lock"):
        assert folders_for([shared]) == everything()
    assert "tests/e2e" not in everything()


def test_documents_run_what_is_about_all_rooms() -> None:
    found = folders_for(["README.md", "docs/routing.md"])
    assert {"tests/test_owner_map.py", "tests/test_structure.py"} <= set(found)
    assert all(name.endswith(".py") for name in found)
    assert folders_for(["tests/e2e/test_oracle.py"]) == found  # no unit tests there


def test_what_is_named_is_there() -> None:
    for name in everything():
        assert Path(ROOT, name).exists()
