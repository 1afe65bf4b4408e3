"""The router as a Serve replica: Serve's HTTP proxy in front, ZeroMQ behind."""

from __future__ import annotations

from typing import Any

from ray import serve
from starlette.types import ASGIApp

from cluster.directory_actor import DirectoryFinder
from cluster.refusal import readable_refusal
from cluster.worker_replica import node_interface
from router.app import build_app
from router.options import RouterOptions
from router.service import Router
from wire.options import parse_options


class RouterReplica:
    """Owns one router for as long as Serve keeps the replica."""

    def __init__(self, options: dict[str, Any], *_workers: Any) -> None:
        """Create or find the directory, build the router. `_workers` are only tied to the application."""
        finder = DirectoryFinder(serve.get_replica_context().app_name)
        with readable_refusal():
            options = {**options, "interface": node_interface(options["interface"])}
            checked = parse_options(RouterOptions, options)
            directory = finder.create(checked.interface, checked.cluster_secret, checked.lease_s)
            self._router = Router(checked.model_copy(update={"directory": directory}))

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Serve's hook: the app it serves for this replica."""
        return build_app(self._router)
