"""The router under Ray Serve, as the deploy files run it, for bench.router: a process of its own.

    python -m bench.router_serve --options FILE

FILE is a JSON object: model (a directory), served_model, port, replicas, ingress ("haproxy" or "proxy"),
scratch (a directory with a short path, for sockets and for what HAProxy leaves behind).

It prints one line of JSON when it serves, and ends its Ray on SIGTERM. Ray Serve reads its switches when it
is imported, so this process sets them first.
"""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from common.arguments import ExactParser
from common.stop_signal import StopSignal

INGRESSES = ("haproxy", "proxy")


def ingress_environment(ingress: str, scratch: Path) -> dict[str, str]:
    """The switches of deploy/cluster.yaml, and names and ports that no other Serve on this machine uses.

    `proxy` is Serve's default: its own proxy in front, and a call to a replica for each request.
    """
    if ingress == "proxy":
        return {}
    home = scratch / "haproxy"
    ports = _free_ports(2)
    first = _free_ports(1)[0]
    return {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(home / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(home / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(home),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(home / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(home / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[1]),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 20),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # nobody else balances load here
    }


def _free_ports(count: int) -> list[int]:
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def _serve(options: dict[str, Any]) -> None:
    """Ray is imported here: see the module's docstring."""
    from cluster.app import router_application
    from cluster.config import parse_config
    from cluster.directory_actor import DirectoryFinder
    from cluster.local import LocalOptions, LocalServe
    from cluster.running import APP_NAME

    config = parse_config(
        {
            "model": options["model"],
            "served_model_name": options["served_model"],
            "router": {"num_replicas": options["replicas"], "options": {"admin_ports": "0"}},
        }
    )
    temp_dir = Path(options["scratch"]) / "ray"
    local_options = LocalOptions(port=options["port"], cpus=config.cpus(), shutdown_s=15.0, temp_dir=temp_dir)
    with LocalServe(local_options) as local:
        stop = StopSignal()
        local.deploy(router_application(config), 120.0, stop)
        finder = DirectoryFinder(APP_NAME)
        print(json.dumps({"directory": finder.wait(10.0), "admin": finder.admins()[0]}), flush=True)
        stop.wait()


def main() -> None:
    """The process."""
    parser = ExactParser(description="The router under Ray Serve, for bench.router.")
    parser.add_argument("--options", type=Path, required=True, help="JSON file")
    options = json.loads(parser.parse_args().options.read_text())
    scratch = Path(options["scratch"])
    (scratch / "haproxy").mkdir(parents=True, exist_ok=True)
    os.environ.update(ingress_environment(options["ingress"], scratch))
    _serve(options)


if __name__ == "__main__":
    main()
