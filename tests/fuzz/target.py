"""The stack that is attacked: one prefill and one decode worker with a real, tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from common.secrets import ClusterSecret
from tests.fuzz.findings import Findings, Footprint, Honest, Logs
from tests.harness.local_stack import Stack, stack
from tests.support.members import secret_of, write_secret
from tests.support.tiny_models import make_tiny

# Small, so that a hostile request that is accepted is soon over.
_ROUTER: dict[str, Any] = {"max_in_flight": 64, "max_queued": 64, "max_queue_s": 2.0}
_WORKER: dict[str, Any] = {
    "max_context_tokens": 256,
    "max_total_tokens": 8192,
    "idle_check_interval_s": 1.0,
    "hand_off_timeout_s": 2.0,
    "resume_grace_s": 0.5,
    "output_lease_s": 5.0,
    # Full before growth counts; by default it keeps 10,000 batches.
    "kv_events_config": {"buffer_batches": 256},
}


class Target:
    """A running stack, and what watches it."""

    def __init__(
        self, running: Stack, findings: Findings, honest: Honest, secret: ClusterSecret | None
    ) -> None:
        self.running = running
        self.secret = secret
        self.findings = findings
        self._honest = honest
        self._logs = Logs(running)
        self._footprint: Footprint | None = None

    def check(self, after: str) -> None:
        """An honest question, and the logs."""
        self._honest.check(after)
        self._logs.check(self.findings, after)

    def remember_footprint(self) -> None:
        """Growth counts from now on."""
        self.running.settle()
        self._footprint = Footprint(self.running)

    def compare_footprint(self) -> None:
        """Memory balances, nothing is held, and neither memory nor descriptors have grown."""
        assert self._footprint is not None, "there is something to compare with"
        self.running.settle()
        self._footprint.compare(self.findings)


@contextmanager
def target(findings: Findings, *, has_secret: bool) -> Iterator[Target]:
    """Start a stack, whose cluster may have a secret, and end it."""
    with tempfile.TemporaryDirectory(prefix="baton-fuzz-") as folder:
        model = make_tiny("qwen3", Path(folder, "model"), 1)
        shared: dict[str, Any] = {}
        if has_secret:
            shared["cluster_secret_file"] = str(write_secret(Path(folder)))
        with (
            stack(model, Path(folder, "run"), router={**_ROUTER, **shared}, **_WORKER, **shared) as running,
            closing(Honest(running, findings)) as honest,
        ):
            yield Target(running, findings, honest, secret_of() if has_secret else None)
