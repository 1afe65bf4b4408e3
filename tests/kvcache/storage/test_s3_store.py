"""S3: another server, objects that were changed, and servers that fail are misses."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import ConfigError
from kvcache.storage import s3_store
from kvcache.storage.blob_store import Outcome, SealedBlob
from kvcache.storage.config import StorageConfig
from kvcache.storage.factory import open_storage
from kvcache.storage.keys import key_text
from kvcache.storage.s3_store import S3Store
from kvcache.storage.seal import SEAL_BYTES
from tests.kvcache.storage.support import Arena, S3Server, free_port, keys

_LENGTH = {"ContentLength": 4096 + SEAL_BYTES}
NAMES = [key_text(key) for key in keys(4)]


def test_pages_lie_under_the_prefix_and_a_second_backend_reads_them(
    s3_server: S3Server, tmp_path: Path
) -> None:
    arena, config = Arena(3, 1 << 20), s3_server.config(tmp_path, "a/b")
    with closing(open_storage(config)) as one, closing(open_storage(config)) as other:
        assert one.set(keys(3), arena.pages) == [True] * 3
        assert other.get(keys(3), arena.read) == [True] * 3
        assert [bytes(page) for page in arena.read] == [bytes(page) for page in arena.pages]
    listed = s3_server.client.list_objects_v2(Bucket=s3_server.BUCKET, Prefix="a/b/public----------")
    assert len(listed["Contents"]) == 3


def test_changed_objects_are_misses(s3_server: S3Server, tmp_path: Path) -> None:
    arena = Arena(3)
    with closing(open_storage(s3_server.config(tmp_path, "changed"))) as backend:
        backend.set(keys(3), arena.pages)
        found = s3_server.client.list_objects_v2(Bucket=s3_server.BUCKET, Prefix="changed/")["Contents"]
        for number, about in enumerate(found):
            old = s3_server.client.get_object(Bucket=s3_server.BUCKET, Key=about["Key"])["Body"].read()
            new = [old[:-1] + bytes([old[-1] ^ 1]), old[:-1], b""][number]
            s3_server.client.put_object(Bucket=s3_server.BUCKET, Key=about["Key"], Body=new)
        assert backend.get(keys(3), arena.read) == [False] * 3
        assert backend.stats().refused == {"corrupt": 3}
        assert backend.exists(keys(3)) == [False] * 3


def test_clear_leaves_what_is_elsewhere(s3_server: S3Server, tmp_path: Path) -> None:
    arena = Arena(1)
    with (
        closing(open_storage(s3_server.config(tmp_path, "one"))) as one,
        closing(open_storage(s3_server.config(tmp_path, "other"))) as other,
    ):
        for backend in (one, other):
            assert backend.set(keys(1), arena.pages) == [True]
        one.clear()
        assert one.exists(keys(1)) == [False]
        assert other.exists(keys(1)) == [True]


def test_clear_leaves_objects_that_are_no_pages(s3_server: S3Server, tmp_path: Path) -> None:
    arena, client, bucket = Arena(1), s3_server.client, s3_server.BUCKET
    with closing(open_storage(s3_server.config(tmp_path, ""))) as backend:
        assert backend.set(keys(1), arena.pages) == [True]
        (page,) = client.list_objects_v2(Bucket=bucket, Prefix="public----------")["Contents"]
        others = {"report.csv", f"deeper/{page['Key']}", f"{page['Key']}.bak", "public----------list"}
        for name in others:
            client.put_object(Bucket=bucket, Key=name, Body=b"of somebody else")
        assert backend.clear() == (1, page["Size"])
        left = {one["Key"] for one in client.list_objects_v2(Bucket=bucket)["Contents"]}
        assert left >= others
        assert page["Key"] not in left
        client.delete_objects(Bucket=bucket, Delete={"Objects": [{"Key": name} for name in others]})


class DenyingClient:
    """S3's client, for two pages of a listing. Objects named in `denied` are not removed, and the answer says
    so, as S3's does."""

    def __init__(self, denied: list[str]) -> None:
        self.denied, self.removed = denied, list[str]()

    def get_paginator(self, _: str) -> DenyingClient:
        return self

    def paginate(self, **_: object) -> list[dict[str, Any]]:
        return [{"Contents": [{"Key": key, "Size": 5} for key in page]} for page in (NAMES[:2], NAMES[2:])]

    def delete_objects(self, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:
        keys = [one["Key"] for one in Delete["Objects"]]
        self.removed += [key for key in keys if key not in self.denied]
        errors = [{"Key": key, "Code": "AccessDenied"} for key in keys if key in self.denied]
        return {"Errors": errors} if errors else {}

    def close(self) -> None:
        pass


def test_objects_that_a_clear_cannot_remove_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = DenyingClient(NAMES[:1])
    monkeypatch.setattr(s3_store, "_client", lambda options: client)
    with closing(open_storage(StorageConfig(backend="s3", path=tmp_path, url="s3://pages/"))) as backend:
        with pytest.raises(OSError, match="1 objects: AccessDenied"):
            backend.clear()
        assert client.removed == NAMES[1:]
        client.denied = []
        assert backend.clear() == (4, 20)


class Bodies:
    """S3's client, for two objects: the first one's body breaks, and then the other's comes."""

    def __init__(self, lacks_length: bool) -> None:
        self.failed, self.is_read = threading.Event(), False
        self._lengths = [{} if lacks_length else _LENGTH, _LENGTH]

    def get_object(self, Bucket: str, Key: str) -> dict[str, Any]:
        if Key == key_text(keys(1)[0]):
            body = SimpleNamespace(readinto=self._break, close=self.failed.set)
            return {"Body": body, **self._lengths[0]}
        return {"Body": SimpleNamespace(readinto=self._fill, close=lambda: None), **self._lengths[1]}

    def close(self) -> None:
        pass

    def _break(self, _: memoryview) -> int:
        raise RuntimeError("urllib3's SSLError is no OSError either")

    def _fill(self, part: memoryview) -> int:
        assert self.failed.wait(10)
        part[:] = bytes([7]) * part.nbytes
        self.is_read = part.nbytes == SEAL_BYTES
        return part.nbytes


@pytest.mark.parametrize("lacks_length", [False, True])
def test_a_read_waits_for_the_others_when_one_fails_in_an_unknown_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacks_length: bool
) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    client, arena = Bodies(lacks_length), Arena(2)
    monkeypatch.setattr(s3_store, "_client", lambda options: client)
    blobs = [SealedBlob(page, memoryview(bytearray(SEAL_BYTES))) for page in arena.read]
    with closing(S3Store(StorageConfig(backend="s3", path=tmp_path, url="s3://pages/"))) as store:
        assert store.read(keys(2), blobs) == [Outcome.IO_ERROR, Outcome.DONE]
        assert client.is_read, "a thread still writes into the page"
    assert "kv storage s3" in caplog.text


class StuckClient:
    """S3's client: what is asked of it waits, and then takes too long."""

    def __init__(self, error: Exception) -> None:
        self.error, self.asked = error, list[str]()
        self.begun, self.ended = threading.Event(), threading.Event()

    def head_object(self, Bucket: str, Key: str) -> None:
        self.asked.append(Key)
        self.begun.set()
        assert self.ended.wait(10)
        raise self.error

    def close(self) -> None:
        pass


@pytest.mark.parametrize("closes", [False, True])
def test_nothing_is_begun_after_a_timeout_or_a_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    exceptions = pytest.importorskip("botocore.exceptions", reason="boto3 is not installed")
    client, answers = StuckClient(exceptions.ReadTimeoutError(endpoint_url="x")), list[list[bool]]()
    monkeypatch.setattr(s3_store, "_client", lambda options: client)
    config = StorageConfig(backend="s3", path=tmp_path, url="s3://pages/", extra={"connections": 1})
    store = S3Store(config)
    asking = threading.Thread(target=lambda: answers.append(store.exists(keys(8))))
    asking.start()
    assert client.begun.wait(10)
    closing_ = threading.Thread(target=store.close)
    if closes:
        closing_.start()
        assert store._closing.wait(10)
    client.ended.set()
    asking.join(10)
    assert answers == [[False] * 8]
    assert client.asked == [key_text(keys(1)[0])]
    if closes:
        closing_.join(10)
    else:
        store.close()
    assert store.exists(keys(2)) == [False] * 2, "asked after it was closed"
    assert len(client.asked) == 1


class ClosingThreads(ThreadPoolExecutor):
    """Threads that are shut down when the second blob of a call is to be given to them."""

    def __init__(self, store: S3Store) -> None:
        super().__init__(1)
        self._store, self._given = store, 0

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self._given += 1
        if self._given == 2:
            self._store.close()
        return super().submit(*args, **kwargs)


def test_blobs_that_a_close_comes_before_are_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exceptions = pytest.importorskip("botocore.exceptions", reason="boto3 is not installed")
    client = StuckClient(exceptions.ReadTimeoutError(endpoint_url="x"))
    client.ended.set()
    monkeypatch.setattr(s3_store, "_client", lambda options: client)
    store = S3Store(StorageConfig(backend="s3", path=tmp_path, url="s3://pages/"))
    monkeypatch.setattr(store, "_threads", ClosingThreads(store))
    assert store.exists(keys(3)) == [False] * 3
    assert client.asked == [key_text(keys(1)[0])]


def test_an_object_that_is_not_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = DenyingClient([])
    monkeypatch.setattr(s3_store, "_client", lambda options: client)
    with closing(open_storage(StorageConfig(backend="s3", path=tmp_path, url="s3://pages/"))) as backend:
        assert backend.remove(keys(1)) == [True]
        client.denied = list(client.removed)
        assert backend.remove(keys(2)) == [False, True]


def test_servers_that_are_away_or_silent_are_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    arena = Arena(1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        for port, cause in ((free_port(), "io_error"), (silent.getsockname()[1], "timeout")):
            extra = {"endpoint_url": f"http://127.0.0.1:{port}", "region": "us-east-1", "timeout_s": 0.2}
            config = StorageConfig(backend="s3", path=tmp_path, url="s3://pages/", extra=extra)
            with closing(open_storage(config)) as backend:
                assert backend.exists(keys(1)) == [False]
                assert backend.set(keys(1), arena.pages) == [False]
                assert backend.get(keys(1), arena.read) == [False]
                assert backend.stats().refused == {cause: 2}
                with pytest.raises(Exception, match="endpoint URL"):  # of S3's client
                    backend.clear()


def test_a_missing_bucket_is_a_miss(s3_server: S3Server, tmp_path: Path) -> None:
    config = s3_server.config(tmp_path, "")
    missing = StorageConfig(backend="s3", path=tmp_path, url="s3://missing/", extra=config.extra)
    with closing(open_storage(missing)) as backend:
        assert backend.set(keys(1), Arena(1).pages) == [False]
        with pytest.raises(Exception, match="NoSuchBucket"):
            backend.clear()


def test_what_cannot_work_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("boto3", reason="boto3 is not installed")
    for url in ("", "pages", "http://pages"):
        with pytest.raises(ConfigError, match="names no bucket"):
            open_storage(StorageConfig(backend="s3", path=tmp_path, url=url))
    with pytest.raises(ConfigError, match="lifecycle rule"):
        open_storage(StorageConfig(backend="s3", path=tmp_path, url="s3://pages", max_bytes=1))
