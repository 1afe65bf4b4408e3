"""RoomRequests: the pages of a prompt have the names here that a worker's tree gives them."""

from __future__ import annotations

import numpy as np
import pytest

from common.secrets import ClusterSecret
from kvcache.radix_key import Namespace
from router.index.global_index import GlobalIndex
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement_options import PolicyWeights
from router.streams.generation import Submission
from router.streams.room_requests import RoomNumbers, RoomRequests
from tests.router.directory.test_directory import record
from wire.page_hash import event_hashes, owned_digests, page_digests, tenant_key
from wire.request import SamplingParams

MODEL, PAGE = "m", 16


def test_a_forgotten_tenants_pages_have_other_names() -> None:
    placer = Placer(GlobalIndex(), make_policy("kv", PolicyWeights(), 0), 10.0)
    placer.update([record("p", model=MODEL)], 0.0)
    submission = Submission(request_id="r", prompts=[[7] * PAGE], sampling=SamplingParams(), tenant="t")
    ((before, placed), *_) = RoomRequests(MODEL).make(submission, placer)
    made = RoomRequests(MODEL, generation=lambda tenant: 5 if tenant == "t" else 0).make(submission, placer)
    ((after, placed_after), *_) = made
    assert (before.tenant_key, after.tenant_key) == ("t", tenant_key("t", 5))
    assert (after.tenant, placed_after.tenant) == ("t", "t"), "what is counted by tenant keeps its name"
    assert placed.hashes.tolist() != placed_after.hashes.tolist()
    assert placed.public_hashes is not None
    assert placed_after.public_hashes is not None
    assert placed.public_hashes.tolist() == placed_after.public_hashes.tolist()


@pytest.mark.parametrize(
    ("space", "tenant"),
    [
        ({}, ""),
        ({"extra_key": "lora"}, ""),
        ({"cache_salt": "pepper"}, ""),
        ({}, "t"),
        ({"extra_key": "lora", "cache_salt": "pepper"}, "t"),
    ],
    ids=lambda one: "+".join(one) or "none",
)
@pytest.mark.parametrize("secret", [None, ClusterSecret((b"in use", b"accepted"))], ids=["", "secret"])
def test_a_prompts_pages_have_the_workers_names(
    space: dict[str, str], tenant: str, secret: ClusterSecret | None
) -> None:
    placer = Placer(GlobalIndex(), make_policy("kv", PolicyWeights(), 0), 10.0)
    placer.update([record("p", model=MODEL)], 0.0)
    prompts = [list(range(3 * PAGE + 1)), [7] * PAGE]
    submission = Submission(
        request_id="r", prompts=prompts, n=2, sampling=SamplingParams(), tenant=tenant, priority=3,
        first_room=RoomNumbers().take(4), **space,
    )  # fmt: skip
    made = RoomRequests(MODEL, secret).make(submission, placer)
    assert [request.choice for request, _ in made] == [0, 1, 0, 1]
    assert len({request.room for request, _ in made}) == 4
    for (request, to_place), prompt in zip(made, [prompts[0]] * 2 + [prompts[1]] * 2, strict=True):
        tokens = np.array(prompt, np.int32).tobytes()
        digests = page_digests(Namespace(MODEL, **space).seed, tokens, PAGE)
        assert to_place.hashes.tolist() == event_hashes(
            owned_digests(digests, tenant, b"in use" if secret else b"")
        )
        assert (request.extra_key, request.cache_salt) == (
            space.get("extra_key", ""), space.get("cache_salt", ""),
        )  # fmt: skip
        assert (request.tenant, request.priority) == (to_place.tenant, to_place.priority) == (tenant, 3)
