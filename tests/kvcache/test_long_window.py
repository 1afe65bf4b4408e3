"""A prompt of 32k tokens through a sliding window: what it holds at every step, read from the pools."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.memory import GroupReport, Memory
from kvcache.radix_key import RadixKey
from tests.kvcache.driver import Driver
from tests.kvcache.support import NAMESPACE, Request, groups, memory

PAGE, WINDOW, CHUNK, PROMPT, STEPS = 16, 1000, 2048, 32_768, 400
WINDOW_PAGES = -(-WINDOW // PAGE)
DECODE_PAGES = WINDOW_PAGES + 1
PREFILL_PAGES = -(-(WINDOW + CHUNK) // PAGE) + 1


def build(prefix_cache: str, window_tokens: int) -> Driver:
    built = memory(
        PAGE,
        pages=(2 * PROMPT + 4096) // PAGE,
        rows=4,
        specs=groups("window", window=WINDOW),
        max_context_len=PROMPT + 1024,
        max_chunk_tokens=CHUNK,
        window_tokens=window_tokens,
        prefix_cache=prefix_cache,
    )
    return Driver(built)


def prompt(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, PROMPT)


def window_pages(driver: Driver) -> GroupReport:
    """Balanced books of the window group."""
    return driver.check().groups["window"]


def in_use(built: Memory) -> int:
    """Window pages that nobody else could have now: neither free nor evictable. Read from the pools."""
    assert built.swa is not None
    return built.swa.allocator.num_pages - built.swa.available_pages()


def run(driver: Driver, req: Request, every: int = 50) -> None:
    """Prefill in chunks, then decode; the bounds hold at each forward, the books balance at many."""
    built = driver.memory
    assert built.swa is not None
    for _ in driver.prefill(req, CHUNK):
        assert in_use(built) <= PREFILL_PAGES
        window_pages(driver)
    assert in_use(built) <= DECODE_PAGES
    for length in driver.decode(req, STEPS):
        assert in_use(built) <= DECODE_PAGES
        assert built.swa.held_pages(req.req_pool_idx or 0) <= DECODE_PAGES
        if length % every == 0:
            window_pages(driver)


@pytest.mark.parametrize("prefix_cache", ["radix", "none"])
def test_a_long_request_holds_its_window_alone(prefix_cache: str) -> None:
    driver = build(prefix_cache, PROMPT)
    req = driver.admit(prompt(0))
    run(driver, req)
    books = window_pages(driver)
    if prefix_cache == "none":
        assert (books.evictable, books.protected) == (0, 0)
        assert books.held <= DECODE_PAGES
    else:
        # What the window left behind is cached; nobody locks it, so anybody may have it.
        assert books.evictable >= (PROMPT - WINDOW) // PAGE - 1
        assert books.protected + books.held <= DECODE_PAGES
    driver.finish(req)
    assert window_pages(driver).held == 0


def test_what_the_window_left_behind_is_another_request_s_to_take() -> None:
    """The pool holds little more than one long prompt; two run at once, and a third takes what they left."""
    driver = build("radix", PROMPT + CHUNK)
    first = driver.admit(prompt(0))
    run(driver, first)
    assert driver.memory.swa is not None
    left = driver.memory.cache.tree.evictable("window")
    second = driver.admit(prompt(1))
    for _ in driver.prefill(second, CHUNK):
        assert in_use(driver.memory) <= DECODE_PAGES + PREFILL_PAGES
    books = window_pages(driver)
    assert books.free < PREFILL_PAGES, "the pool is full"
    assert books.evictable < left + PROMPT // PAGE, "the second took pages that the first had left behind"
    for req in (first, second):
        row = driver.memory.swa.table[req.req_pool_idx or 0]
        needed = driver.memory.swa.needed_from(req.kv_committed_len)
        assert row[needed : -(-req.kv_committed_len // PAGE)].all(), "a page that is still needed was taken"
    match = driver.memory.cache.match_prefix(RadixKey(prompt(1)[:-1], NAMESPACE))
    assert len(match.device_indices) == PROMPT - PAGE, "the newer prompt can be continued from its end"
    driver.finish(first)
    driver.finish(second)
    assert window_pages(driver).held == 0
