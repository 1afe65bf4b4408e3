"""StorageConfig: which backend keeps pages, where, and how many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import ConfigError
from common.options import OptionsType, parse_options
from common.secrets import ClusterSecret


@dataclass(frozen=True)
class StorageConfig:
    """What `open_storage` needs. `extra` is checked by the backend that it is for."""

    backend: str = "file"  # a name of storage/factory.py, or `module:Class` of a BlobStore
    path: Path | None = None  # the directory of backends that keep files
    url: str = ""  # the address of backends that are servers
    max_bytes: int = 0  # at most so many are kept by all processes together; 0: the backend's own bound
    fsync: bool = False  # a page is on the disk before it can be found
    direct_io: bool = False  # past the kernel's page cache
    secret: ClusterSecret | None = None  # of the seals
    key_file: Path | None = None  # where the cluster has no secret; None: in `path`, else the user's cache
    extra: Mapping[str, Any] = field(default_factory=dict)

    def options(self, kind: type[OptionsType]) -> OptionsType:
        """What `extra` says. Raises ConfigError naming the first bad key."""
        try:
            return parse_options(kind, self.extra)
        except ConfigError as error:
            key = f"hicache_storage_backend_extra_config.{error.key}"
            raise ConfigError(key, error.problem, error.remedy) from None
