"""WorkerOptions names the key of what cannot work. tests/e2e/test_bad_input.py starts processes with it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.options import parse_options
from worker.options import WorkerOptions

ROOT = Path(__file__).parents[2]
_REFUSED = re.compile(r'(?:ConfigError\(\s*|^_KEY = )"([^"]+)"', re.MULTILINE)


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


def test_refusals_of_the_cache_and_the_engine_name_options_that_there_are() -> None:
    """They are written where only the configuration of the room is known."""
    sources = [path for room in ("kvcache", "engine", "kvtransfer") for path in (ROOT / room).rglob("*.py")]
    keys = {key for path in sources for key in _REFUSED.findall(path.read_text())}
    assert "hicache_storage_path" in keys
    other = {"BATON_CPU_ISA", "tenants.min_share", "window_tokens"}  # the last one is set by no option
    assert keys - other <= WorkerOptions.model_fields.keys()


def test_the_name_in_the_api_is_the_last_part_of_the_model() -> None:
    for model in ("models/tiny", "models/tiny/", "owner/tiny"):
        assert WorkerOptions(model=model).model_name == "tiny"
    assert WorkerOptions(model="models/tiny", served_model_name="other").model_name == "other"
