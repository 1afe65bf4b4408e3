"""Ray and Serve on this machine for one application: started, watched and ended by handle.

What is started here is a child of this process, and `close` ends it. `ray stop` is not used: it would end
every Ray on the machine.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray.serve import RunTarget
from ray.serve.schema import ApplicationStatus

from cluster.config import OBJECT_STORE_BYTES
from cluster.directory_actor import DirectoryFinder
from cluster.refusal import find_refusal
from cluster.running import APP_NAME, connect_ray
from cluster.start_display import StartDisplay
from common.errors import BatonError, ConfigError, Unavailable
from common.host import HTTP_PORT, LOOPBACK
from common.stop_signal import StopSignal

ROUTER = "router"
_POLL_S = 0.1
_HTTP_TIMEOUT_S = 5.0


class DeployFailed(BatonError):
    """Serve gave up the application, or the application was not ready in time."""


@dataclass(frozen=True)
class LocalOptions:
    """Where Serve listens and which Ray it runs on. Port 0 is not possible: Serve does not report the port
    that it gets."""

    host: str = LOOPBACK
    port: int = HTTP_PORT
    ray_address: str | None = None  # None: start a Ray
    shutdown_s: float = 90.0  # for the replicas to drain and end
    cpus: float = 0.0  # that the application reserves; a Ray that is started here offers at least as many
    temp_dir: Path | None = None  # of a Ray that is started here; short, because it holds Unix sockets
    worker_logs: bool = False

    @property
    def url(self) -> str:
        """Where the API answers."""
        host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(self.host, self.host)  # noqa: S104 (not bound)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


class LocalServe:
    """A running Ray and Serve for one application. A context manager."""

    def __init__(self, options: LocalOptions) -> None:
        """Start, or connect to `ray_address`. Raises ConfigError for a port that Serve cannot listen on."""
        self.options = options
        self._ready = False
        if options.ray_address is None:
            check_port_free(options.host, options.port)
        self._start_ray()
        try:
            serve.start(proxy_location="HeadOnly", http_options={"host": options.host, "port": options.port})
            self._check_joined()
        except BaseException:
            ray.shutdown()
            raise

    def deploy(
        self,
        application: serve.Application,
        timeout_s: float,
        stop: StopSignal | None = None,
        display: StartDisplay | None = None,
    ) -> None:
        """Run the application and wait until it answers, or until `stop` comes. `display` prints what
        workers say meanwhile.

        Raises ConfigError when a replica refuses its configuration, DeployFailed when Serve gives up or
        `timeout_s` passes.
        """
        deadline = time.monotonic() + timeout_s
        serve.run_many(
            [RunTarget(application, name=APP_NAME)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
        finder = DirectoryFinder(APP_NAME)
        while True:
            ready = self._running() and self._seen()
            if display is not None:
                display.say_notes(finder)
            if ready:
                self._ready = True
                return
            if time.monotonic() >= deadline:
                raise DeployFailed(f"not ready after {timeout_s:.0f} s: {serve.status()}")
            if stop is None:
                time.sleep(_POLL_S)
            elif stop.wait(_POLL_S):
                return

    def close(self) -> None:
        """Let the application drain and end it; then disconnect from Ray, which ends a Ray started here.

        An application that has never answered has nothing to drain: it ends with the Ray that was started for
        it.
        """
        if not ray.is_initialized():
            return
        try:
            if self.options.ray_address is None and not self._ready:
                return
            deadline = time.monotonic() + self.options.shutdown_s
            # On another thread: calls of a Ray whose processes were killed return after a minute.
            draining = threading.Thread(target=_drain, args=(deadline,), name="drain", daemon=True)
            draining.start()
            while draining.is_alive() and self.ray_answers() and time.monotonic() < deadline:
                draining.join(_POLL_S)
        finally:
            ray.shutdown()

    def ray_answers(self) -> bool:
        """Whether Ray's control service still listens."""
        host, _, port = str(ray.get_runtime_context().gcs_address).rpartition(":")
        try:
            socket.create_connection((host, int(port)), _HTTP_TIMEOUT_S).close()
        except OSError:
            return False
        return True

    def __enter__(self) -> LocalServe:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_ray(self) -> None:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve reports each of its own steps
        if self.options.ray_address is not None:
            connect_ray(self.options.ray_address, self.options.worker_logs)
            return
        temp_dir = {"_temp_dir": str(self.options.temp_dir)} if self.options.temp_dir else {}
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, math.ceil(self.options.cpus)),
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=self.options.worker_logs,
            logging_level="ERROR",
            **temp_dir,
        )

    def _check_joined(self) -> None:
        """Raises ConfigError when Serve, which may have run before, has this application or another port."""
        if APP_NAME in serve.status().applications:
            raise ConfigError(
                "RAY_ADDRESS",
                f"this Ray already serves an application {APP_NAME}",
                "end it, or use RAY_ADDRESS=local",
            )
        try:
            url = f"{self.options.url}/-/healthz"
            urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S).close()  # noqa: S310 (http, see url)
        except urllib.error.HTTPError:
            return  # Serve answers, whatever the status
        except OSError:
            raise ConfigError(
                "port", f"Serve on this Ray does not listen on {self.options.port}", "give its own --port"
            ) from None

    def _running(self) -> bool:
        """Whether all deployments have their replicas. Raises ConfigError or DeployFailed if they cannot get
        them."""
        status = serve.status().applications[APP_NAME]
        messages = [status.message, *(one.message for one in status.deployments.values())]
        for message in messages:
            refusal = find_refusal(message)
            if refusal is not None:
                raise refusal
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            raise DeployFailed("\n".join(message for message in messages if message))
        return bool(status.status == ApplicationStatus.RUNNING)

    def _seen(self) -> bool:
        """Whether all running workers have joined, and the router answers."""
        deployments = serve.status().applications[APP_NAME].deployments
        running = sum(
            one.replica_states.get("RUNNING", 0) for name, one in deployments.items() if name != ROUTER
        )
        try:
            if DirectoryFinder(APP_NAME).worker_count() < running:
                return False
            url = f"{self.options.url}/{'ready' if running else 'health'}"
            urllib.request.urlopen(url, timeout=_HTTP_TIMEOUT_S).close()  # noqa: S310 (http, see url)
        except (Unavailable, urllib.error.URLError, ConnectionError, TimeoutError):
            return False
        return True


def _drain(deadline: float) -> None:
    """Delete the application, which drains it, and wait until it is gone, or until `deadline`."""
    serve.delete(APP_NAME, _blocking=False)  # blocking would give up after 60 s, however long a drain
    while APP_NAME in serve.status().applications and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def stop_first() -> None:
    """From now on SIGTERM ends this process as Ctrl-C does: what has been started is ended first."""
    signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGINT))


def check_port_free(host: str, port: int) -> None:
    """Raises ConfigError when `port` of `host` cannot be bound."""
    if not 0 < port < 65536:
        raise ConfigError("port", f"{port} is not a TCP port", "give a free --port from 1 to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "port", f"{port} on {host} cannot be used ({error.strerror})", "give a free --port"
            ) from None
