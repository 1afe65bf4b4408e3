"""A ConfigError survives the way through a traceback in Serve's status message."""

from __future__ import annotations

import traceback

import pytest

from cluster.refusal import ReplicaRefused, find_refusal, readable_refusal
from common.errors import ConfigError


def test_a_config_error_is_found_again_in_a_traceback() -> None:
    original = ConfigError("model", 'needs {"a": 1}\nand more', "use another; or wait")
    with pytest.raises(ReplicaRefused) as caught, readable_refusal():
        raise original
    text = "Error:\n" + "".join(traceback.format_exception(caught.value))
    found = find_refusal(text)
    assert found is not None
    assert str(found) == str(original)
    assert (found.key, found.problem, found.remedy) == (original.key, original.problem, original.remedy)


def test_other_errors_pass_and_other_messages_hold_none() -> None:
    with pytest.raises(KeyError), readable_refusal():
        raise KeyError("x")
    assert find_refusal("RuntimeError: something else") is None
