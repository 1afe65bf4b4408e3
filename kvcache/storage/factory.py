"""Opens the storage backend that a configuration names."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from kvcache.storage.aibrix_store import AIBrixStore
from kvcache.storage.backend import StorageBackend
from kvcache.storage.blob_store import BlobStore
from kvcache.storage.config import StorageConfig
from kvcache.storage.file_io import KernelFiles
from kvcache.storage.file_store import FileStore
from kvcache.storage.hf3fs_files import Hf3fsFiles, Hf3fsOptions
from kvcache.storage.lmcache_store import LMCacheStore
from kvcache.storage.mooncake_store import MooncakeStore
from kvcache.storage.nixl_files import NixlFiles, NixlOptions
from kvcache.storage.s3_store import S3Store
from kvcache.storage.sealed import SealedStorage
from kvcache.storage.secret import KEY_NAME, SealSecret, key_in


def open_storage(config: StorageConfig) -> StorageBackend:
    """Raises ConfigError if it cannot work as configured."""
    opened = _STORES.get(config.backend)
    store = opened(config) if opened is not None else _dynamic(config)
    return SealedStorage(store, _seal_secret(config))


def _seal_secret(config: StorageConfig) -> SealSecret:
    if config.secret is not None:
        return SealSecret(config.secret)
    if config.key_file is not None:
        return SealSecret(None, key_in(config.key_file))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton"
    return SealSecret(None, key_in((config.path or cache) / KEY_NAME))


def _file(config: StorageConfig) -> BlobStore:
    _refuse_extra(config)
    files = KernelFiles(fsync=config.fsync, direct=config.direct_io)
    return FileStore(_directory(config), config.max_bytes, files, fsync=config.fsync)


def _nixl(config: StorageConfig) -> BlobStore:
    files = NixlFiles(config.options(NixlOptions), fsync=config.fsync)
    return FileStore(_directory(config), config.max_bytes, files, fsync=config.fsync)


def _hf3fs(config: StorageConfig) -> BlobStore:
    directory = _directory(config)
    files = Hf3fsFiles(directory, config.options(Hf3fsOptions), fsync=config.fsync)
    return FileStore(directory, config.max_bytes, files, fsync=config.fsync)


def _dynamic(config: StorageConfig) -> BlobStore:
    """`module:Class`, built with the configuration."""
    module, _, name = config.backend.partition(":")
    if not name:
        raise ConfigError(
            "hicache_storage_backend",
            f"{config.backend!r} is unknown",
            f"use one of {', '.join(_STORES)}, or module:Class",
        )
    try:
        kind: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            "hicache_storage_backend", f"{config.backend}: {error}", "name a class to import"
        ) from None
    if not _is_store(kind):
        raise ConfigError(
            "hicache_storage_backend", f"{config.backend} is no BlobStore", "derive it from BlobStore"
        )
    store: BlobStore = kind(config)
    return store


def _is_store(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BlobStore)


def _directory(config: StorageConfig) -> Path:
    if config.path is None:
        raise ConfigError("hicache_storage_path", f"{config.backend} needs a directory", "name one")
    return config.path


def _refuse_extra(config: StorageConfig) -> None:
    if config.extra:
        raise ConfigError(
            "hicache_storage_backend_extra_config",
            f"{config.backend} knows no {min(config.extra)}",
            "remove it",
        )


_STORES: dict[str, Callable[[StorageConfig], BlobStore]] = {
    "file": _file,
    "aibrix": AIBrixStore,
    "hf3fs": _hf3fs,
    "lmcache": LMCacheStore,
    "mooncake": MooncakeStore,
    "nixl": _nixl,
    "s3": S3Store,
}
