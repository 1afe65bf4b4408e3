"""The digest of a model's files, and of what is done to them at load: which model a stored page is of.

All bytes of the weights are hashed, not samples as for the fingerprint: stored pages outlive processes, and
a model of the same name may have other weights the next day. SHA-256 does about 2 GB/s a core, so the digest
of each file is kept, beside the model or, where nothing can be written there, in the user's cache directory.
It is used again as long as the file has the same size and time of change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers.utils import cached_file

from common.start_log import StartProgress
from engine.config import EngineConfig

CACHE_NAME = ".baton-digests.json"
_PATTERNS = ("*.safetensors", "config.json", "*quant*.json")
_PIECE = 16 << 20
_THREADS = 4
_LOCK_S = 600.0  # another worker hashes the same files meanwhile
_LARGEST_CACHE = 1 << 22

log = logging.getLogger(__name__)


def model_digest(config: EngineConfig) -> bytes:
    """32 bytes that name the model as this configuration loads it; it must have been downloaded.

    Raises OSError.
    """
    local = Path(config.model)
    if not local.is_dir():
        local = Path(str(cached_file(config.model, "config.json", local_files_only=True))).parent
    loaded = (config.dtype, config.weight_dtype, config.kv_cache_dtype)
    files = sorted(_digests(local).items())
    return hashlib.sha256(json.dumps(["baton-model-1", loaded, files]).encode()).digest()


def _digests(directory: Path) -> dict[str, str]:
    """SHA-256 of each file that decides what the model computes, by name."""
    paths = sorted({path for pattern in _PATTERNS for path in directory.glob(pattern)})
    cache = _cache_file(directory)
    lock = FileLock(f"{cache}.lock", timeout=_LOCK_S, mode=0o600)
    try:
        lock.acquire()  # workers that start together hash once
    except (OSError, Timeout) as error:
        log.warning("the model's files are hashed without a lock: %s", error)
    try:
        known = _read_cache(cache)
        stamps = {path.name: _stamp(path) for path in paths}
        new = [path for path in paths if known.get(path.name, {}).get("stamp") != stamps[path.name]]
        if new:
            for path, digest in zip(new, _hash_all(new), strict=True):
                known[path.name] = {"stamp": stamps[path.name], "sha256": digest}
            _write_cache(cache, {name: known[name] for name in stamps})
        return {path.name: known[path.name]["sha256"] for path in paths}
    finally:
        lock.release()


def _hash_all(paths: list[Path]) -> Iterable[str]:
    progress = StartProgress("model files hashed", sum(path.stat().st_size for path in paths))
    with ThreadPoolExecutor(min(_THREADS, len(paths))) as threads:
        return list(threads.map(lambda path: _hash(path, progress), paths))


def _hash(path: Path, progress: StartProgress) -> str:
    digest = hashlib.sha256()
    piece = memoryview(bytearray(min(_PIECE, max(1, path.stat().st_size))))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(piece):
            digest.update(piece[:size])  # without the GIL
            progress.add(size)
    return digest.hexdigest()


def _stamp(path: Path) -> list[int]:
    about = path.stat()
    return [about.st_size, about.st_mtime_ns]


def _cache_file(directory: Path) -> Path:
    beside = directory / CACHE_NAME
    if os.access(beside if beside.exists() else directory, os.W_OK) and os.access(directory, os.W_OK):
        return beside
    own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "baton" / "digests"
    with contextlib.suppress(OSError):
        own.mkdir(parents=True, exist_ok=True)
    return own / f"{hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]}.json"


def _read_cache(path: Path) -> dict[str, dict[str, Any]]:
    """What is known of files. A file that is missing or spoilt says nothing."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_LARGEST_CACHE))
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {
        name: about
        for name, about in entries
        if isinstance(about, dict)
        and isinstance(about.get("sha256"), str)
        and isinstance(about.get("stamp"), list)
    }


def _write_cache(path: Path, known: dict[str, dict[str, Any]]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(known, indent=1))
        partial.replace(path)
    except OSError as error:
        log.warning("the digests of the model's files are not kept: %s", error)
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
