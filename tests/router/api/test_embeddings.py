"""/v1/embeddings: the forms of vectors, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.router.conftest import RouterProcess, start_router
from tests.support.fake_worker import VECTOR, FakeWorker
from wire.messages.rooms import Decode, Prefill
from wire.records import Role
from wire.request import Pooling

RAW = np.frombuffer(VECTOR, dtype="<f4")  # 3, 4, 0, 12
Service = tuple[RouterProcess, FakeWorker]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Service]:
    """A prefill worker stands by, and is not asked."""
    router = start_router(tmp_path_factory.mktemp("embeddings"), model, pooling="mean")
    prefill = FakeWorker(Role.PREFILL, router.mailbox)
    decode = FakeWorker(Role.DECODE, router.mailbox, max_context=64)
    router.wait_for_workers(2)
    yield router, decode
    assert prefill.count(Prefill) == 0
    for worker in (prefill, decode):
        worker.close()
    assert router.stop() == 0


def test_openais_client_gets_vectors_in_order(service: Service) -> None:
    router, worker = service
    before = len(worker.seen)
    answer = router.openai().embeddings.create(model="tiny", input=["Hello", "The quick brown fox"])
    assert [one.index for one in answer.data] == [0, 1]
    for one in answer.data:  # the client asks for base64
        np.testing.assert_allclose(one.embedding, RAW / 13, rtol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 2
    starts = [message.request for message in worker.seen[before:] if isinstance(message, Decode)]
    assert {start.sampling.pooling for start in starts} == {Pooling.MEAN}
    assert {start.sampling.max_new_tokens for start in starts} == {1}


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, RAW / 13),
        ({"dimensions": 2}, np.array([0.6, 0.8])),
        ({"dimensions": 2, "normalize": False}, np.array([3.0, 4.0])),
        ({"input": [1, 2, 3], "pooling": "last"}, RAW / 13),
        ({"input": [[1, 2, 3]], "dimensions": 4, "encoding_format": "float"}, RAW / 13),
    ],
)
def test_forms_of_a_vector(service: Service, fields: dict[str, Any], want: Any) -> None:
    router, worker = service
    asked = {"model": "tiny", "input": "Hello", **fields}
    (told,) = router.http.post("/v1/embeddings", json=asked).json()["data"]
    np.testing.assert_allclose(told["embedding"], want, rtol=1e-6)
    packed = router.http.post("/v1/embeddings", json={**asked, "encoding_format": "base64"}).json()
    raw = base64.b64decode(packed["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, dtype="<f4"), want, rtol=1e-6)
    last = [message for message in worker.seen if isinstance(message, Decode)][-1]
    assert last.request.sampling.pooling == fields.get("pooling", "mean")


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"dimensions": 5}, 400, "dimensions"),
        ({"dimensions": 0}, 400, "dimensions"),
        ({"input": []}, 400, "input"),
        ({"input": ""}, 400, "input"),
        ({"input": [1] * 64}, 400, "input"),
        ({"input": [10**6]}, 400, "input"),
        ({"pooling": "cls"}, 400, "pooling"),
        ({"temperature": 1}, 400, "temperature"),
        ({"model": "other"}, 404, "model"),
    ],
)
def test_what_is_wrong_is_named(service: Service, fields: dict[str, Any], status: int, param: str) -> None:
    router, _ = service
    answer = router.http.post("/v1/embeddings", json={"input": "Hello", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
