"""Which pools other processes can map, and what memory there is for pools."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from engine.fake import fake_spec
from worker import capacity
from worker.capacity import cache_config, chosen_config, host_budget, host_free
from worker.options import WorkerOptions


@pytest.mark.parametrize(
    ("backend", "device", "shared"),
    [
        ("auto", "cpu", True),
        ("tcp", "cpu", True),
        ("auto", "cuda:0", True),
        ("cuda_ipc", "cuda:0", True),
        ("tcp", "cuda:0", False),
        ("mooncake", "cuda:0", False),
    ],
)
def test_a_pool_on_a_gpu_is_shared_where_cuda_ipc_may_be_used(
    backend: str, device: str, shared: bool
) -> None:
    options = WorkerOptions(model="m", kv_transfer_backend=backend)
    assert chosen_config(options, True, device).shared is shared
    assert chosen_config(options, False, device).shared is shared


def test_a_worker_takes_its_share_of_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "available_memory", lambda: 16 << 30)
    assert host_budget(WorkerOptions(model="m", kv_memory_fraction=0.25))() == 4 << 30


def test_more_tokens_than_memory_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host gives memory when it is used: the worker would start, and be killed later."""
    monkeypatch.setattr(capacity, "available_memory", lambda: 1 << 20)
    spec = fake_spec(max_position=64)
    page = sum(group.page_bytes(16) for group in spec.groups)
    fit = ((1 << 20) // page - 1) * 16  # the scratch page

    def sized(tokens: int) -> int:
        options = WorkerOptions(model="m", max_total_tokens=tokens)
        chosen = chosen_config(options, False, "cpu")
        budget, free = host_budget(options), host_free(options)
        return cache_config(options, spec, chosen, budget, free).total_tokens

    assert sized(fit) == fit
    with pytest.raises(ConfigError, match=f"do not fit .* use {fit} or fewer") as refused:
        sized(fit + 16)
    assert refused.value.key == "max_total_tokens"
