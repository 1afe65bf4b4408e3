"""The workspaces of a FlashInfer wrapper, and who may write to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

WORKSPACE_BYTES = 394 << 20
"""Of device memory, for partial results: as much as vLLM gives it. Wrappers that run one after the other
share it. A plan that needs more fails: recorded steps need it for 16 query rows of each sequence and KV head
or more, so 1,024 sequences with 32 KV heads of 256 do not fit."""


class Workspace:
    """Keeps a plan from overwriting the one before it while that is still being copied to the device.

    `plan` writes to a pinned buffer and queues a copy of it behind the forwards that are queued already. With
    overlap the host is ahead of the device: without this the next plan would change what that copy reads. For
    heads the buffer is one of the wrapper. For latents each plan allocates one and then frees that of the
    plan before; torch's allocator does not know of the copy, which FlashInfer's C++ queues, and hands the
    buffer out again at once. Two buffers that alternate would do for heads; waiting for the copy does for
    both, needs no second set of recorded steps and costs nothing at overlap depth 1, where the forward before
    the last one is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Plan inside this context. Waits for the copies of the plan before. If the device hangs, so does
        this; the worker then ends, because its result does not come in time (DeviceLost)."""
        if self._copied is not None:
            self._copied.synchronize()  # returns at once if it was never recorded
        yield
        if self._copied is not None:
            self._copied.record()
