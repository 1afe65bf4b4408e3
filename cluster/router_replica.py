"""The router as a Serve replica: Serve's HTTP proxy in front, ZeroMQ behind."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import Any

from ray import serve
from ray.exceptions import RayError

from cluster.directory_actor import DirectoryFinder, DirectorySockets, patiently
from cluster.model_files import TOKENIZER_FILES, model_directory
from cluster.node import node_interface
from cluster.refusal import readable_refusal
from cluster.role_keeper import RolePlan
from cluster.router_config import parse_router_config
from common.descriptors import allow_descriptors
from common.errors import ConfigError, Unavailable
from common.garbage import freeze_gc
from common.host import AUTO
from router.admin_listener import AdminListener
from router.api.app import build_app
from router.api.asgi import App, Receive, Scope, Send
from router.keys import API_KEYS_ENV
from router.options import RoutedModel, RouterOptions
from router.service import Router

log = logging.getLogger(__name__)

_FOLLOW_S = 1.0
_DIRECTORY_WAIT_S = 60.0


class RouterReplica:
    """Owns one router for as long as Serve keeps the replica."""

    # Serve awaits the constructor: the router must start on the event loop that will serve its requests.
    async def __init__(  # type: ignore[misc]
        self, options: RouterOptions, plans: Mapping[str, RolePlan], *_workers: Any, keys_given: bool = False
    ) -> None:
        """Create or find the directory, which assigns roles by the `plans`, and start the router. `_workers`
        are only tied to the application. `keys_given`: API keys were in the environment in which it was
        built. Raises ReplicaRefused for options that cannot work."""
        allow_descriptors()
        self._plans = plans
        self._configured = False
        self._finder = DirectoryFinder(serve.get_replica_context().app_name)
        self._interface = options.interface
        own = options.admin_host == AUTO
        with readable_refusal():
            if keys_given:
                check_keys(options)
            # A key drawn for the Serve config would change with every deploy, and so restart the replicas.
            self._resume_key = options.shared_resume_key()
            models = [await asyncio.to_thread(_with_files, one) for one in options.served]
            self._options = options.model_copy(
                update={
                    **dict.fromkeys(("model", "served_model_name")),
                    "models": tuple(models),
                    "interface": node_interface(options.interface),
                    # Loopback is right here, though other nodes do not reach it.
                    "admin_host": node_interface(AUTO) if own else options.admin_host,
                }
            )
            self._admin = AdminListener(self._options, self._options.interface)
            directory, self._resume_key = await asyncio.to_thread(patiently, self._join, _DIRECTORY_WAIT_S)
            found = {"directory": directory, "resume_key": self._resume_key}
            self._router = Router(self._options.model_copy(update=found), admin_url=self._admin.url)
        self._admin.start(self._router.pages.open)
        freeze_gc()
        self._following = asyncio.create_task(self._follow_directory())

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve's hook: `user_config` of the deployment, at the start and whenever another one is deployed.

        Raises ReplicaRefused at the start for one that cannot work. Later such a one changes nothing: Serve
        would stop the routers that serve, and others could not start.
        """
        with readable_refusal():
            try:
                config = parse_router_config(user_config, frozenset(self._router.models))
            except ConfigError as error:
                if not self._configured:
                    raise
                log.error("this user_config changes nothing: %s", error)
                return
        self._configured = True
        self._router.membership.weights.configure(config.version_weights)

    def __serve_build_asgi_app__(self) -> App:
        """Serve's hook: the app it serves for this replica."""
        return without_request_id(build_app(self._router))

    async def check_health(self) -> None:
        """Serve's health check. Raises when a thread of the router has ended; Serve then replaces the
        replica."""
        if not self._router.healthy:
            raise Unavailable("the thread that follows KV events has ended")

    async def __del__(self) -> None:
        """Serve awaits this after the requests that it counts have ended."""
        if hasattr(self, "_following"):
            self._following.cancel()
            await self._admin.close()
            self._router.close()

    def _join(self) -> tuple[str, str | None]:
        """The directory's address, and the key with which this replica signs event ids, unless it derives it
        from the cluster's secret. Raises Unavailable when the directory ends meanwhile."""
        address = self._directory()
        self._finder.follow_plans(self._plans)
        drawn = self._options.resume_key is None and self._resume_key is not None
        return address, self._finder.resume_key() if drawn else self._resume_key

    def _directory(self) -> str:
        options = self._options
        sockets = DirectorySockets(self._interface, options.ports.mailboxes, options.cluster_secret_file)
        return self._finder.ensure(sockets, options.lease_s, self._resume_key, self._plans)

    async def _follow_directory(self) -> None:
        """Create the directory again when its owner has gone, and look where it is. Off the token path."""
        while True:
            await asyncio.sleep(_FOLLOW_S)
            try:
                self._router.membership.move_directory(await asyncio.to_thread(self._directory))
            except (RayError, Unavailable) as error:
                log.warning("the directory cannot be reached, trying again: %s", error)


def check_keys(options: RouterOptions) -> None:
    """Ray does not pass the environment on: without the keys that were meant, everybody would be let in."""
    if options.api_keys_file is None and API_KEYS_ENV not in os.environ:
        raise ConfigError(
            "api_keys_file",
            f"{API_KEYS_ENV} was set where the application was built, and is not in the router's environment",
            "set it for Ray on every node, or in `env` of the router, or give a file",
        )


def _with_files(model: RoutedModel) -> RoutedModel:
    return model.model_copy(update={"model": model_directory(str(model.model), TOKENIZER_FILES)})


def without_request_id(app: App) -> App:
    """The app without its X-Request-Id header: Serve answers with the same header.

    Clients would join the two and read the id as "a, a".
    """

    async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_once(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            await send(message)

        await app(scope, receive, send_once)

    return wrapped
