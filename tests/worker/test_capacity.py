"""Which pools other processes can map, and what memory there is for pools."""

from __future__ import annotations

import pytest

from worker import capacity
from worker.capacity import chosen_config, host_budget
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
