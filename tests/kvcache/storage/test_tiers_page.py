"""docs/tiers.md lists every storage backend and what each can be told."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.options import Options
from kvcache.storage.aibrix_store import AIBrixOptions
from kvcache.storage.factory import _STORES
from kvcache.storage.hf3fs_files import Hf3fsOptions
from kvcache.storage.lmcache_store import LMCacheOptions
from kvcache.storage.mooncake_store import MooncakeOptions
from kvcache.storage.nixl_files import NixlOptions
from kvcache.storage.s3_store import S3Options

PAGE = (Path(__file__).parents[3] / "docs" / "tiers.md").read_text()
EXTRA: dict[str, type[Options]] = {
    "aibrix": AIBrixOptions,
    "hf3fs": Hf3fsOptions,
    "lmcache": LMCacheOptions,
    "mooncake": MooncakeOptions,
    "nixl": NixlOptions,
    "s3": S3Options,
}


@pytest.mark.parametrize("name", _STORES)
def test_a_row_says_what_a_backend_can_be_told(name: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |"))
    for key in EXTRA[name].model_fields if name in EXTRA else ():
        assert f"`{key}`" in row, key
