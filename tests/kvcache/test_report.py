"""node_reports: the tree for a program."""

from __future__ import annotations

from kvcache.config import CacheConfig
from kvcache.memory import Memory, build_memory
from kvcache.radix_key import Namespace, RadixKey
from kvcache.report import node_reports, pretty_print
from tests.kvcache.support import SPEC, radix_cache

LORA = Namespace("m", extra_key="lora", cache_salt="salt")


def insert(memory: Memory, tokens: list[int], namespace: Namespace, tenant: str = "") -> None:
    pages = memory.allocator.alloc_pages(len(tokens) // 4)
    assert pages is not None
    inserted = radix_cache(memory).insert(RadixKey(tokens, namespace, tenant), pages)
    memory.allocator.free_page_ids(pages[: inserted.prefix_len // 4])


def test_every_node_says_whose_child_it_is_and_what_it_keeps() -> None:
    with build_memory(CacheConfig(64, 64, 2, page_size=4), (SPEC,)) as memory:
        insert(memory, [*range(8)], LORA)
        insert(memory, [*range(4), 9, 9, 9, 9], LORA)
        insert(memory, [*range(8)], Namespace("m"))
        insert(memory, [*range(8)], Namespace("m"), "me")
        reports = node_reports(memory.cache.tree)
        roots = [report for report in reports if report["parent"] == -1]
        assert sorted((r["tenant"], r["extra_key"], r["cache_salt"], len(r["tokens"])) for r in roots) == [
            ("", "", "", 8),
            ("", "lora", "salt", 4),
            ("me", "", "", 8),
        ]
        tails = [report for report in reports if report["parent"] != -1]
        assert sorted(report["tokens"] for report in tails) == [[4, 5, 6, 7], [9, 9, 9, 9]]
        for report in tails:
            parent = reports[report["parent"]]
            assert (parent["tokens"], parent["extra_key"]) == ([0, 1, 2, 3], "lora")
            assert report["media"] == ["GPU"]
            assert (report["lock"], report["is_bigram"], report["held"]) == (0, False, {"full": 4})


def test_without_a_prefix_cache_there_are_no_nodes() -> None:
    with build_memory(CacheConfig(64, 64, 2, page_size=4, prefix_cache="none"), (SPEC,)) as memory:
        assert node_reports(memory.cache.tree) == []
        assert pretty_print(memory.cache.tree) == "prefix caching is off"
