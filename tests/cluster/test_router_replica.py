"""The router's replica, without Ray."""

from __future__ import annotations

import asyncio
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
