"""The router's replica, without Ray."""

from __future__ import annotations

import asyncio
import resource
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.router_replica import RouterReplica
from common.errors import Unavailable


def test_serve_is_told_when_the_router_follows_no_events_any_more() -> None:
    replica: Any = SimpleNamespace(_router=SimpleNamespace(healthy=True))
    asyncio.run(RouterReplica.check_health(replica))
    replica._router.healthy = False
    with pytest.raises(Unavailable, match="KV events"):
        asyncio.run(RouterReplica.check_health(replica))


def test_it_may_have_descriptors_for_many_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoReplica(Exception):
        pass

    def context() -> Any:
        raise NoReplica

    monkeypatch.setattr("cluster.router_replica.serve.get_replica_context", context)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        replica: Any = SimpleNamespace()
        options: Any = None
        with pytest.raises(NoReplica):
            asyncio.run(RouterReplica.__init__(replica, options, {}))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65_536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
