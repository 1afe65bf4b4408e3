"""Around the tokens: KV events and routing by them, namespaces, priorities, and a cluster with a secret.

Real processes with the fake engine: no model matters here, and its answers still betray a wrong page.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import zmq

from engine.fake import fake_generate
from tests.e2e.asking import ask, timeline
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.kv_events_reader import Pages, pages_of, replayed, waiting
from tests.support.members import OTHER_SECRET, write_secret

PAGE_SIZE = 8
LONG = 20 * PAGE_SIZE
FOUR = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": 4}


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(256) for _ in range(count)]


def workers(running: Stack) -> list[dict[str, Any]]:
    return list(running.admin.get("/debug/workers").json()["workers"])


def about(running: Stack, request_id: str) -> dict[str, Any]:
    return dict(timeline(running, request_id, lanes=3)["about"])


# -- one prefill and one decode worker in a cluster with a secret ----------------------------------------


@pytest.fixture(scope="module")
def secret_stack(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """1P + 1D that speak CURVE; one prefill chunk a step, and steps that take a moment."""
    directory = tmp_path_factory.mktemp("secret")
    secret = {"cluster_secret_file": str(write_secret(directory))}
    with stack(
        tiny_model,
        directory,
        router={
            "prefill_on_decode_tokens": 0,
            "max_queued": 0,
            "trusted_tenant_header": "X-Baton-Tenant",
            **secret,
        },
        **secret,
        engine="fake",
        fake_step_s=0.03,
        page_size=PAGE_SIZE,
        chunked_prefill_size=64,
        max_prefill_tokens=64,
        max_total_tokens=8192,
    ) as running:
        yield running


def test_a_cluster_with_a_secret_answers(secret_stack: Stack) -> None:
    rng = random.Random(13)
    prompts = [tokens(rng, count) for count in (1, 40, 130)]
    answers = secret_stack.generate_all(prompts, 8)
    assert [answer["output_ids"] for answer in answers] == [fake_generate(prompt, 8) for prompt in prompts]
    secret_stack.settle()


def test_namespaces_share_nothing(secret_stack: Stack) -> None:
    prompt = tokens(random.Random(14), 100)
    whole = 96  # of 100 tokens, in pages of 8; the last token is always computed
    spaces: list[dict[str, str]] = [
        {}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "a"},
    ]  # fmt: skip
    bytes_moved = []
    for visit, cached in (("first", 0), ("again", whole)):
        for i, space in enumerate(spaces):
            request_id = f"{visit}-{i}"
            answer = ask(secret_stack, prompt, FOUR, {"X-Request-Id": request_id}, **space)
            assert answer["output_ids"] == fake_generate(prompt, 4)
            assert answer["meta_info"]["cached_tokens"] == cached, space
            bytes_moved.append(about(secret_stack, request_id)["kv_bytes"])
    (page_bytes,) = {worker["groups"][0]["page_bytes"] for worker in workers(secret_stack)}
    assert bytes_moved == [13 * page_bytes] * 5 + [page_bytes] * 5  # decode holds a namespace's pages, or not
    secret_stack.settle()


def test_the_router_hears_of_pages_and_does_not_only_expect_them(secret_stack: Stack) -> None:
    """What it expects of its own choices would hide that it hashes pages otherwise than the workers do."""
    text = "".join(random.Random(18).choices("0123456789", k=LONG))  # digits: a token each
    ask(secret_stack, ids_of(secret_stack, text), FOUR)
    heard = {"device": LONG, "host": 0, "storage": 0, "expected": 0}
    deadline = time.monotonic() + 10.0
    while (held := held_tokens(secret_stack, text)) != [heard, heard]:
        assert time.monotonic() < deadline, held
    secret_stack.settle()


def held_tokens(running: Stack, text: str, tenant: str = "") -> list[dict[str, int]]:
    """Of a tenant's text, by tier: what the router knows of the prefill and the decode worker."""
    route = running.admin.get("/debug/route", params={"prompt": text, "tenant": tenant}).json()
    return [route[role][0]["held_tokens"] for role in ("prefill", "decode")]


def test_a_tenant_is_told_of_its_own_cached_tokens_only(secret_stack: Stack) -> None:
    """Whoever asked first, and on both workers: a foreign prompt is as one that nobody has asked."""
    text = "".join(random.Random(15).choices("0123456789", k=50))
    prompt = ids_of(secret_stack, text)
    asked = ["one", "two", None, "one", "two", None]
    headers = [{"X-Baton-Tenant": name} if name else {} for name in asked]
    answers = [ask(secret_stack, prompt, FOUR, header) for header in headers]
    assert [answer["output_ids"] for answer in answers] == [fake_generate(prompt, 4)] * 6
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0, 0, 48, 48, 48]
    deadline = time.monotonic() + 10.0
    heard = {"device": 48, "host": 0, "storage": 0, "expected": 0}
    for tenant in ("one", "two", ""):
        while (held := held_tokens(secret_stack, text, tenant)) != [heard, heard]:
            assert time.monotonic() < deadline, held
    nothing = heard | {"device": 0}
    assert held_tokens(secret_stack, text, "three") == [nothing, nothing]
    secret_stack.settle()


def test_greater_priority_is_prefilled_first(secret_stack: Stack) -> None:
    rng = random.Random(16)
    queue = [("busy", 0, 7000), ("low", 1, 60), ("high", 2, 60)]
    (prefill,) = secret_stack.prefill
    prompts = {name: tokens(rng, count) for name, _, count in queue}
    with ThreadPoolExecutor(len(queue)) as pool:
        futures = {}
        for arrived, (name, priority, _) in enumerate(queue, start=1):
            futures[name] = pool.submit(
                ask, secret_stack, prompts[name], FOUR, {"X-Request-Id": name}, priority=priority
            )
            wait_for_rooms(secret_stack, prefill, arrived)
        for name, future in futures.items():
            assert future.result()["output_ids"] == fake_generate(prompts[name], 4)
    at = {}
    for name, *_ in queue:
        stages = timeline(secret_stack, name, lanes=3)["stages"]
        at[name] = {stage: ns for lane in stages.values() for stage, ns in lane}
    assert at["low"]["prefill_waiting"] < at["high"]["prefill_waiting"]
    assert at["high"]["prefill_forward"] < at["low"]["prefill_forward"]
    secret_stack.settle()


def wait_for_rooms(running: Stack, worker: Child, count: int) -> None:
    deadline = time.monotonic() + 20.0
    while len(rooms := running.inspect(worker, "rooms")) != count:
        assert time.monotonic() < deadline, f"{rooms} are there, {count} were sent"


# -- KV events, and what the router makes of them ----------------------------------------------------------


@pytest.fixture(scope="module")
def four_workers(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """2P + 2D, with so little memory that pages are evicted. Steps take a moment: to compute what is cached
    must cost more than a busy machine adds to other prices."""
    with stack(
        tiny_model,
        tmp_path_factory.mktemp("four"),
        prefill=2,
        decode=2,
        router={"prefill_on_decode_tokens": 0, "max_queued": 0},
        engine="fake",
        fake_step_s=0.03,
        page_size=PAGE_SIZE,
        chunked_prefill_size=64,
        max_total_tokens=1024,
        decode_reserve_tokens=32,
    ) as running:
        yield running


def test_events_say_what_the_trees_hold(four_workers: Stack) -> None:
    rng = random.Random(11)
    records = {record["id"]: record for record in workers(four_workers)}
    with ExitStack() as cleanup:
        context = cleanup.enter_context(zmq.Context())
        live: dict[str, zmq.Socket[bytes]] = {}
        for name, record in records.items():
            live[name] = cleanup.enter_context(context.socket(zmq.SUB))
            live[name].subscribe(b"")
            live[name].connect(record["events"])
        shared = [tokens(rng, 50), tokens(rng, 90)]
        for _ in range(3):
            prompts = [
                shared[i % 2][: rng.randrange(90)] + tokens(rng, rng.randrange(1, 150)) for i in range(12)
            ]
            answers = four_workers.generate_all(prompts, 12)
            assert [a["output_ids"] for a in answers] == [fake_generate(prompt, 12) for prompt in prompts]
        four_workers.settle()
        for worker in four_workers.workers:
            name = worker.ready["id"]
            batches = replayed(records[name]["replay"])
            heard = waiting(live[name])
            assert heard, "a subscriber heard nothing"
            assert heard.items() <= batches.items()
            pages = Pages("m")
            pages.apply(batches)
            assert pages.removed, "nothing was evicted: the test is too small"
            assert pages_of(four_workers.inspect(worker, "nodes"), "m", PAGE_SIZE) == pages.held


def test_a_repeat_goes_to_the_prefill_worker_that_holds_the_prefix(four_workers: Stack) -> None:
    rng = random.Random(12)
    for worker in four_workers.prefill:
        name = worker.ready["id"]
        text = text_that_goes_to(four_workers, name, rng)
        wait_until_known(four_workers, text, name)
        for turn in range(3):  # equals take turns; these are not equal
            longer = ids_of(four_workers, text) + tokens(rng, 10)
            request_id = f"{name}-{turn}"
            answer = ask(four_workers, longer, FOUR, {"X-Request-Id": request_id})
            assert answer["output_ids"] == fake_generate(longer, 4)
            assert answer["meta_info"]["cached_tokens"] == LONG
            assert about(four_workers, request_id)["prefill"] == name
    four_workers.settle()


def test_a_namespace_goes_through_hashes_events_and_routing(four_workers: Stack) -> None:
    """A LoRA's id or an image's hash (one string) and a salt: own pages, under names of their own."""
    rng = random.Random(17)
    text = "".join(rng.choices("0123456789", k=LONG))
    prompt = ids_of(four_workers, text)
    space = {"extra_key": "lora-7 image:9f2c\u00fc", "cache_salt": "pepper"}
    others: list[dict[str, str]] = [{}, {"extra_key": space["extra_key"]}, {"cache_salt": "pepper"}]
    ask(four_workers, prompt, FOUR, **space)
    deadline = time.monotonic() + 10.0
    while hit_tokens(four_workers, text, space) != LONG:
        assert time.monotonic() < deadline, "the router does not learn of the pages"
    assert [hit_tokens(four_workers, text, other) for other in others] == [0, 0, 0]
    answer = ask(four_workers, prompt + tokens(rng, 10), FOUR, **space)
    assert answer["meta_info"]["cached_tokens"] == LONG
    four_workers.settle()
    named = 0
    records = {record["id"]: record for record in workers(four_workers)}
    for worker in four_workers.workers:
        pages = Pages("m")
        pages.apply(replayed(records[worker.ready["id"]]["replay"]))
        nodes = four_workers.inspect(worker, "nodes")
        assert pages_of(nodes, "m", PAGE_SIZE) == pages.held
        named += sum((node["extra_key"], node["cache_salt"]) == tuple(space.values()) for node in nodes)
    assert named >= 2, "a prefill and a decode worker hold the prompt in its namespace"


def hit_tokens(running: Stack, text: str, space: dict[str, str]) -> int:
    """What the router believes the best prefill worker holds of a text."""
    answer = running.admin.get("/debug/route", params={"prompt": text, **space}).json()
    return int(answer["winner"]["prefill"]["hit_tokens"])


def text_that_goes_to(running: Stack, prefill: str, rng: random.Random) -> str:
    """A text of LONG tokens that was prefilled there. Several come at once: alone, each would go to the
    worker with the least measured price of a transfer."""
    for attempt in range(5):
        texts = {  # digits: a token each
            f"new-{prefill}-{attempt}-{i}": "".join(rng.choices("0123456789", k=LONG)) for i in range(8)
        }

        def send(request_id: str, text: str) -> None:
            ask(running, ids_of(running, text), FOUR, {"X-Request-Id": request_id})

        with ThreadPoolExecutor(len(texts)) as pool:
            list(pool.map(send, texts.keys(), texts.values()))
        for request_id, text in texts.items():
            if about(running, request_id)["prefill"] == prefill:
                return text
    raise AssertionError(f"nothing goes to {prefill}")


def ids_of(running: Stack, text: str) -> list[int]:
    return list(running.http.post("/tokenize", json={"prompt": text}).json()["tokens"])


def wait_until_known(running: Stack, text: str, prefill: str) -> None:
    """Until the router's index says that `prefill` holds the text: events come a moment after the answer."""
    deadline = time.monotonic() + 10.0
    known: object = None
    while known != {"id": prefill, "hit_tokens": LONG}:
        assert time.monotonic() < deadline, f"the router believes {known}"
        winner = running.admin.get("/debug/route", params={"prompt": text}).json()["winner"]["prefill"]
        known = {key: winner[key] for key in ("id", "hit_tokens")}


# -- and the one outside ----------------------------------------------------------------------------------


def test_a_worker_with_another_secret_cannot_join(
    secret_stack: Stack, tiny_model: Path, tmp_path: Path
) -> None:
    options = {
        "model": str(tiny_model), "served_model_name": "m", "engine": "fake", "page_size": PAGE_SIZE,
        "max_total_tokens": 1024, "directory": secret_stack.directory.ready["mailbox"],
        "cluster_secret_file": str(write_secret(tmp_path, OTHER_SECRET)), "join_timeout_s": 3.0,
    }  # fmt: skip
    with Child("decode_node", options, tmp_path) as stranger:
        assert stranger.process.wait(60.0) == 2
        line = stranger.log.read_text().splitlines()[-1]
    assert line.startswith("decode_node: directory: ")
    assert {worker["id"] for worker in workers(secret_stack)} == {
        worker.ready["id"] for worker in secret_stack.workers
    }
    secret_stack.settle()
