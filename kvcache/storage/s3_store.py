"""S3Store: blobs as objects of a bucket, in Amazon S3 or a server that speaks its protocol.

A write joins page and seal: one copy, as S3's client signs and sends one body. A read goes from the socket
into the page. The blobs of a call travel at once, on `connections` threads. After a timeout no other of them
is begun: each would wait as long.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

from pydantic import Field

from common.errors import ConfigError
from common.options import Options
from kvcache.storage.blob_store import BlobStore, Held, Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.keys import VISIBILITY_BYTES, key_text

log = logging.getLogger(__name__)
Result = TypeVar("Result")
_DELETED_AT_ONCE = 1000  # S3's own bound
_NAME = re.compile(rf"[0-9a-z-]{{{VISIBILITY_BYTES}}}[0-9a-f]{{64}}")  # what key_text gives
_DENIED, _ABSENT, _NO_ROOM = 403, 404, 507


class S3Options(Options):
    """`StorageConfig.extra` of this backend. Credentials come from where boto3 finds them."""

    endpoint_url: str | None = None  # of a server that is not Amazon's
    region: str | None = None
    connections: int = Field(default=8, ge=1, le=128)
    timeout_s: float = Field(default=10.0, gt=0)  # of one blob; then no other of its call is begun


class S3Store(BlobStore):
    """See the module. `config.url`: s3://BUCKET/PREFIX. The bucket is bounded by its own lifecycle rules."""

    name: ClassVar[str] = "s3"

    def __init__(self, config: StorageConfig) -> None:
        """Nothing is asked of the server yet. Raises ConfigError for what cannot work."""
        options = config.options(S3Options)
        parts = urlsplit(config.url)
        if parts.scheme != "s3" or not parts.netloc:
            raise ConfigError(
                "hicache_storage_url", f"{config.url!r} names no bucket", "give s3://BUCKET/PREFIX"
            )
        if config.max_bytes:
            raise ConfigError("hicache_storage_size", "s3 keeps no bound", "give the bucket a lifecycle rule")
        self._bucket = parts.netloc
        self._prefix = f"{parts.path.strip('/')}/".lstrip("/")
        self._timeout_s = options.timeout_s
        self._client = _client(options)
        self._threads = ThreadPoolExecutor(options.connections, "s3")
        self._closing = threading.Event()

    def exists(self, names: Sequence[bytes]) -> list[bool]:
        return [outcome is Outcome.DONE for outcome in self._each(self._look, names)]

    def read(self, names: Sequence[bytes], into: Sequence[SealedBlob]) -> list[Outcome]:
        return self._each(self._read, names, into)

    def write(self, names: Sequence[bytes], blobs: Sequence[SealedBlob]) -> list[Outcome]:
        return self._each(self._write, names, blobs)

    def discard(self, name: bytes) -> bool:
        def remove() -> Outcome:
            return Outcome.IO_ERROR if self._remove([self._key(name)]) else Outcome.DONE

        return _outcome(remove) is Outcome.DONE

    def clear(self, prefix: bytes) -> Held:
        removed: list[int] = []
        kept: dict[str, str] = {}
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix + prefix.decode()
        )
        for page in pages:
            found = [one for one in page.get("Contents", []) if self._is_ours(one["Key"])][:_DELETED_AT_ONCE]
            if found:
                kept |= self._remove([one["Key"] for one in found])
                removed += [one["Size"] for one in found if one["Key"] not in kept]
        if kept:  # all that can be removed is
            raise OSError(f"S3 has not removed {len(kept)} objects: {', '.join(sorted({*kept.values()}))}")
        return Held(len(removed), sum(removed))

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown()  # for those that have begun: they may write into pages
        self._client.close()

    def _each(self, work: Callable[..., Outcome], *of_each: Sequence[Any]) -> list[Outcome]:
        """The outcome of each blob, all of them at once. However it ends, no thread uses a page any more."""
        late = threading.Event()

        def do(*one: Any) -> Outcome:
            if late.is_set() or self._closing.is_set():
                return Outcome.TIMEOUT
            outcome = _outcome(lambda: work(*one))
            if outcome is Outcome.TIMEOUT:
                late.set()
            return outcome

        blobs = list(zip(*of_each, strict=True))
        running: list[Future[Outcome]] = []
        try:
            for one in blobs:
                running.append(self._threads.submit(do, *one))
        except RuntimeError:  # `close` has shut the threads down meanwhile; there is no way to ask first
            if not self._closing.is_set():
                raise
        finally:
            wait(running)
        not_begun = [Outcome.TIMEOUT] * (len(blobs) - len(running))
        return [done.result() for done in running] + not_begun

    # -- one blob ----------------------------------------------------------------------------------

    def _key(self, name: bytes) -> str:
        return self._prefix + key_text(name)

    def _is_ours(self, key: str) -> bool:
        """Whether an object is a blob of this store: others may keep theirs under the same prefix."""
        return _NAME.fullmatch(key.removeprefix(self._prefix)) is not None

    def _look(self, name: bytes) -> Outcome:
        self._client.head_object(Bucket=self._bucket, Key=self._key(name))
        return Outcome.DONE

    def _read(self, name: bytes, blob: SealedBlob) -> Outcome:
        deadline = time.monotonic() + self._timeout_s
        answer = self._client.get_object(Bucket=self._bucket, Key=self._key(name))
        body = answer["Body"]
        try:
            if answer["ContentLength"] != blob.nbytes:
                return Outcome.CORRUPT
            for part in blob:
                while part.nbytes:
                    if time.monotonic() > deadline:
                        return Outcome.TIMEOUT
                    count = body.readinto(part)
                    if not count:
                        return Outcome.IO_ERROR
                    part = part[count:]
        finally:
            body.close()
        return Outcome.DONE

    def _write(self, name: bytes, blob: SealedBlob) -> Outcome:
        self._client.put_object(Bucket=self._bucket, Key=self._key(name), Body=b"".join(blob))
        return Outcome.DONE

    def _remove(self, keys: list[str]) -> dict[str, str]:
        """The keys of those that stay, and S3's codes for why."""
        answer = self._client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        return {one["Key"]: one.get("Code", "?") for one in answer.get("Errors", [])}


def _outcome(work: Callable[[], Outcome]) -> Outcome:
    """What `work` says, or what its failure means."""
    from botocore.exceptions import (
        BotoCoreError,
        ClientError,
        ConnectTimeoutError,
        HTTPClientError,
        ReadTimeoutError,
    )

    try:
        return work()
    except (ConnectTimeoutError, ReadTimeoutError):
        return Outcome.TIMEOUT
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return {_ABSENT: Outcome.MISSING, _DENIED: Outcome.READ_ONLY, _NO_ROOM: Outcome.FULL}.get(
            status, Outcome.IO_ERROR
        )
    except (BotoCoreError, HTTPClientError, OSError):
        return Outcome.IO_ERROR
    except Exception as error:  # noqa: BLE001 - urllib3's are not all wrapped, and an answer may lack its length
        log.warning("kv storage s3: %r", error)
        return Outcome.IO_ERROR


def _client(options: S3Options) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(
            "hicache_storage_backend",
            f"S3's client cannot be loaded: {error}",
            "pip install 'baton-serve[s3]'",
        ) from None
    return boto3.client(
        "s3",
        endpoint_url=options.endpoint_url,
        region_name=options.region,
        config=Config(
            connect_timeout=options.timeout_s,
            read_timeout=options.timeout_s,
            retries={"total_max_attempts": 1},
            max_pool_connections=options.connections,
            request_checksum_calculation="when_required",  # the seal is checked
            response_checksum_validation="when_required",
        ),
    )
