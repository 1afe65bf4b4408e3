"""WorkerOptions names the key of what cannot work. tests/e2e/test_bad_input.py starts processes with it."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import ConfigError
from common.options import parse_options
from worker.options import WorkerOptions


@pytest.mark.parametrize(
    ("options", "key", "words"),
    [
        ({"page_size": 24}, "page_size", "power of two"),
        ({"paeg_size": 16}, "paeg_size", "use one of"),
        ({"kv_transfer_backend": "pigeon"}, "kv_transfer_backend", "'shm'"),
        ({"eviction_policy": "coin"}, "eviction_policy", "lru"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size", "correct"),
        ({"kv_events_config": {"enabled": True}}, "kv_events_config.enabled", "use one of: buffer_batches,"),
        ({"served_model_name": " "}, "served_model_name", "empty name"),
    ],
)
def test_refusals_name_the_key(options: dict[str, Any], key: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options(WorkerOptions, {"model": "any", **options})
    assert caught.value.key == key
    assert words in str(caught.value)


def test_the_name_in_the_api_is_the_last_part_of_the_model() -> None:
    for model in ("models/tiny", "models/tiny/", "owner/tiny"):
        assert WorkerOptions(model=model).model_name == "tiny"
    assert WorkerOptions(model="models/tiny", served_model_name="other").model_name == "other"
