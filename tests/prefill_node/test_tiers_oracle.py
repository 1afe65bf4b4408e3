"""Every family over all tiers, against transformers.generate.

The device's pool holds one conversation of three, so that every request sends others' pages down and brings
its own back; in some cases the host's does, too, and they come from storage. Then both workers are started
again, and all that they know is in storage. `make tiers` runs all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcache.quant import KVFormat
from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES
from tests.support.conversations import (
    CONVERSATIONS,
    RESTART,
    converse,
    known_conversations,
    served,
    small,
)
from tests.support.oracle import covering
from tests.support.tier_cases import POLICIES, TierCase, ask_times, tier_cases
from tests.support.tiny_models import make_tiny

IN_MAKE_TEST = (
    "llama", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mistral_window", "gpt_oss", "qwen3_next",
    "falcon_h1", "lfm3",
)  # fmt: skip
"""One family for each pair of policies."""


# -- against transformers ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", tier_cases(set(zip(IN_MAKE_TEST, POLICIES, strict=True))))
def test_the_oracle_over_all_tiers(case: TierCase, tmp_path: Path, tmp_path_factory: Any) -> None:
    write, prefetch = case.policies
    path, rounds = known_conversations(case.family, tmp_path_factory.getbasetemp())
    options = case.options(path, tmp_path / "kv")
    waits = prefetch != "best_effort"
    with served(options, case.split, case.ask_times) as before:
        before.check(rounds[:RESTART])
        assert before.evicted() > 0
        if waits or case.host_ratio > 1:
            assert before.loads() >= CONVERSATIONS, "every second turn comes back"
        if waits and case.host_ratio == 1 and write != "write_back":  # which has no page on both
            assert before.read_pages() > 0, "the host was too small"
    with served(options, case.split, case.ask_times) as after:
        after.check(rounds[RESTART:], case.together)
        if waits:
            # A write_back worker ends with its last conversation on the device, and nowhere else.
            # A host that holds one conversation reads none for requests that wait behind others.
            assert after.loads() >= (
                CONVERSATIONS - (write == "write_back") if case.host_ratio > 1 or not case.together else 1
            )
            assert after.read_pages() > 0


# -- against the same without tiers --------------------------------------------------------------------


def same_cases() -> list[Any]:
    """Formats of KV and sampled answers, with every policy; one case in six is in `make test`."""
    forms = [form.value for form in KVFormat]
    families = ("qwen3", "gpt_oss", "mistral_window", "qwen3_next")
    rows: list[Any] = covering(
        [families, forms, WRITE_POLICIES, PREFETCH_POLICIES, (True, False), (0.0, 0.8), (8.0, 1.0)]
    )
    return [
        pytest.param(*row, marks=pytest.mark.oracle if i % 6 == 0 else pytest.mark.oracle_full)
        for i, row in enumerate(sorted(rows))
    ]


@pytest.mark.parametrize(
    ("family", "form", "write", "prefetch", "split", "temperature", "ratio"), same_cases()
)
def test_quantised_and_sampled_answers_are_the_same_as_without_tiers(
    family: str,
    form: str,
    write: str,
    prefetch: str,
    split: bool,
    temperature: float,
    ratio: float,
    tmp_path: Path,
    tmp_path_factory: Any,
) -> None:
    path = make_tiny(family, tmp_path_factory.getbasetemp(), 3)
    options = small(
        path,
        tmp_path / "kv",
        page_size=8,
        chunked_prefill_size=24,
        kv_cache_dtype=form,
        hicache_ratio=ratio,
        hicache_write_policy=write,
        hicache_storage_prefetch_policy=prefetch,
    )
    plain = {**options, "hicache_ratio": 0.0, "hicache_storage_backend": "", "prefix_cache": "none"}
    with served(plain, split=False, temperature=temperature) as without:
        rounds = converse(lambda prompts: [without.answer(prompt) for prompt in prompts])
    with served(options, split, ask_times(write), temperature) as before:
        before.check(rounds[:RESTART])
        assert before.evicted() > 0
    with served(options, split, ask_times(write), temperature) as after:
        after.check(rounds[RESTART:])
        if prefetch != "best_effort":
            assert after.read_pages() > 0
            assert after.loads() > 0
