"""Windows, states and latents when workers die, stop, or a network is bad: real processes, 2P + 2D.

The fake engine's answers betray a window page or a state that is stale, lost or another room's. The real tiny
models (`make oracle`) say what transformers does, whoever dies in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from engine.fake import fake_generate
from tests.chaos.network import Network
from tests.e2e.test_failures import OPTIONS, OUTPUT_TOKENS, ROUTER, kill, prompts, take, wait_until_busy
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.reference import draw_model

GROUPS = ("window", "state")
HYBRID: dict[str, Any] = {
    **OPTIONS,
    "fake_groups": GROUPS,
    "page_size": 8,
    "swa_full_tokens_ratio": 0.3,
    "max_mamba_cache_size": 40,
    "mamba_track_interval": 16,
    "max_running_requests": 8,
    "overlap_depth": 1,
}


def right(asked: list[list[int]]) -> list[list[int]]:
    return [fake_generate(prompt, OUTPUT_TOKENS, groups=GROUPS) for prompt in asked]


def ask_while(
    running: Stack, asked: list[list[int]], tokens: int, happens: Callable[[Child], None], rooms: int = 2
) -> list[Any]:
    """All answers, where something happens once so many rooms decode on one worker; it is told on which."""
    with ThreadPoolExecutor(len(asked)) as pool:
        futures = [pool.submit(running.generate, prompt, tokens) for prompt in asked]
        happens(wait_until_busy(running, rooms))
        return [future.result(100.0)["output_ids"] for future in futures]


@pytest.mark.invariants
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_worker_that_dies_in_mid_stream(tiny_model: Path, tmp_path: Path, role: str) -> None:
    """Then everything is asked again, of those that are left: what they cached must be right."""
    asked = prompts(16, seed=8)
    with stack(tiny_model, tmp_path, prefill=2, decode=2, router=ROUTER, **HYBRID) as running:

        def dies(busy: Child) -> None:
            kill(running.prefill.pop(1) if role == "prefill" else take(running.decode, busy))

        assert ask_while(running, asked, OUTPUT_TOKENS, dies) == right(asked)
        running.settle()
        again = running.generate_all(asked, OUTPUT_TOKENS)
        assert [answer["output_ids"] for answer in again] == right(asked)
        running.settle()


def test_states_and_windows_stay_in_quarantine_while_a_peer_may_write(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Prefill is stopped in a write. Meanwhile decode serves alone, from what memory is left."""
    asked = prompts(8, seed=9)
    flag = tmp_path / "stop"
    options = {**HYBRID, "hand_off_timeout_s": 3.0, "runner": ("tests.support.stops_in_write", str(flag))}
    with stack(tiny_model, tmp_path, prefill=1, decode=1, router=ROUTER, **options) as running:
        running.generate(asked[0], 4)
        prefill = running.prefill.pop()
        flag.touch()
        try:
            answers = running.generate_all(asked, OUTPUT_TOKENS)
            assert [answer["output_ids"] for answer in answers] == right(asked)
            held = running.inspect(running.decode[0], "memory")
            assert held["quarantined_pages"] > 0
            assert all(held["groups"][group]["quarantined"] > 0 for group in GROUPS)
        finally:
            kill(prefill)
        running.settle()


@pytest.mark.invariants
def test_a_bad_network(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(3)
    asked = [[rng.randrange(256) for _ in range(rng.randrange(1, 150))] for _ in range(24)]
    asked += [prompt[:64] + asked[0][:9] for prompt in asked[:8]]
    options = {**HYBRID, "fake_step_s": 0.0}
    with (
        Network(3) as network,
        stack(
            tiny_model, tmp_path, prefill=2, decode=2, router=ROUTER,
            runner=("tests.chaos.launcher", network.address), **options,
        ) as running,
    ):  # fmt: skip
        network.faults.lose_all()
        answers = running.generate_all(asked, OUTPUT_TOKENS)
        network.faults.heal()
        assert [answer["output_ids"] for answer in answers] == right(asked)
        running.settle()


# -- real models -----------------------------------------------------------------------------------------

TOKENS = 160  # long enough to be in mid-stream when somebody dies


@pytest.mark.oracle_full
@pytest.mark.parametrize("family", ["qwen3_next", "gpt_oss", "mistral_window", "deepseek_v3"])
def test_a_real_model_whoever_dies(family: str, tmp_path: Path) -> None:
    rng = random.Random(family)
    asked = [[rng.randrange(256) for _ in range(length)] for length in (40, 77, 96, 130)]
    path, answers = draw_model(family, tmp_path, 5, asked, TOKENS)
    options: dict[str, Any] = {
        "dtype": "float32", "threads": 1, "page_size": 8, "chunked_prefill_size": 24, "overlap_depth": 1,
        "max_total_tokens": 2048, "mamba_track_interval": 32, "max_running_requests": 8,
        "hand_off_timeout_s": 20.0,
    }  # fmt: skip
    with stack(path, tmp_path, prefill=2, decode=2, router=ROUTER, **options) as running:
        # One room: until the dead prefill worker's lease ends, the others may be waiting for it.
        assert ask_while(running, asked, TOKENS, lambda _: kill(running.prefill.pop(0)), 1) == answers
        running.settle()
        assert ask_while(running, asked, TOKENS, lambda busy: kill(take(running.decode, busy)), 1) == answers
        running.settle()
