"""Scene: hosts, an operator and a Redis, and the application on them, from `ray up` to `ray down`."""

from __future__ import annotations

import copy
import secrets
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from common.host import HTTP_PORT
from tests.cluster_hosts.asking import chat, content, generate, prompts
from tests.cluster_hosts.cluster import Cluster
from tests.cluster_hosts.host import Host
from tests.cluster_hosts.operator import Operator
from tests.cluster_hosts.readme import DRAIN, JOIN, ROOT, read_commands, replaced
from tests.cluster_hosts.wheels import use_wheels
from tests.hosts.network import Network

HOSTS = ("head", "worker-1", "worker-2")
OPERATOR = "operator"
SHIPPED = yaml.safe_load((ROOT / "deploy" / "cluster-serve.yaml").read_text())
_UP_S, _JOIN_S, _SERVE_S, _DOWN_S, _COMMAND_S = 900.0, 600.0, 240.0, 180.0, 120.0
_LIBRARIES = ("baton_router", "kernels", "page-copies")  # what the setup commands build
WORKERS = "WORKER_ADDRESS_1, WORKER_ADDRESS_2"
_LEFT_S = 20.0  # for processes that have been told to end
_CONFIG = "deploy/this-run.yaml"


class Scene:
    """`words`: what stands in README and deploy/cluster.yaml for the words in capitals. The main thread is on
    the operator's host, and so are the threads that it starts."""

    def __init__(self, operator: Operator, cluster: Cluster, spare: Host, words: Mapping[str, str]) -> None:
        self.cluster, self.spare = cluster, spare
        self._operator, self._words = operator, dict(words)
        self._commands = read_commands((ROOT / "README.md").read_text())

    @property
    def urls(self) -> list[str]:
        """Where clients go."""
        return [f"http://{host.address}:{HTTP_PORT}" for host in self.cluster.hosts]

    def up(self) -> None:
        """`ray up` as README says: two hosts, each with kernels of its own."""
        self._operator.edit_cluster_file(self._words)
        self._run(self._commands.token, _COMMAND_S)
        self._run(self._commands.up, _UP_S)
        self.cluster.wait_for_nodes({host.address for host in self.cluster.hosts}, _JOIN_S)
        for host in self.cluster.hosts:
            built = host.run("ls ~/.cache/baton").split()
            for name in _LIBRARIES:
                found = [one for one in built if one.startswith(name) and one.endswith(".so")]
                assert len(found) == 1, f"{host.name}: {built}"

    def serve_shipped(self) -> int:
        """Deploy the shipped configuration and chat with it at every host. Returns how many were right."""
        self._run(self._commands.deploy, _COMMAND_S)
        self.cluster.wait_for_replicas({"router": 1, "prefill": 1, "decode": 1}, _SERVE_S)
        self.cluster.wait_for_ingress(_SERVE_S)
        answer = self._run(self._commands.ask, _COMMAND_S)
        assert content(answer), f"README's request: {answer}"
        return 1 + sum(chat(host.address) for host in self.cluster.hosts)

    def add(self) -> None:
        """Add the spare host to the cluster, as docs/operations.md says: its setup begins."""
        addresses = [host.address for host in (*self.cluster.hosts[1:], self.spare)]
        self._operator.edit_cluster_file({**self._words, WORKERS: ", ".join(addresses)})
        for command in JOIN:
            self._run(command, _UP_S)

    def wait_for_join(self) -> None:
        """Until the spare host is a node."""
        self.cluster.hosts.append(self.spare)
        self.cluster.wait_for_nodes({host.address for host in self.cluster.hosts}, _UP_S)

    def drain(self, host: Host) -> None:
        """Say that the host will be switched off, as docs/operations.md says."""
        words = {"ID": self.cluster.nodes()[host.address], "WHY": "maintenance"}
        self._run(f"ray exec deploy/cluster.yaml '{DRAIN}'", _COMMAND_S, **words)

    def switch_off(self, host: Host) -> None:
        """It is not a part of the cluster any more."""
        host.kill()
        self.cluster.hosts.remove(host)

    def roles(self, arguments: str) -> None:
        """`baton roles`, on the head."""
        self.cluster.head.run(f"cd baton && RAY_AUTH_MODE=token .venv/bin/baton roles {arguments}")

    def up_again(self) -> None:
        """`ray up` after the head was off."""
        self._run(self._commands.up, _UP_S)

    def serve_apart(self, backend: str) -> int:
        """Prefill on one host, decode on the other, pages over `backend`. Returns how many were right."""
        first, second = (host.address for host in self.cluster.hosts)
        wanted = {"router": 1, "prefill": 1, "decode": 1}
        self.deploy_anew(configuration(backend, prefill=on(first), decode=on(second)), wanted)
        assert self.cluster.addresses("prefill") == [first]
        assert self.cluster.addresses("decode") == [second]
        asked = prompts(1, 4, 200, 40)
        for number, prompt in enumerate(asked):
            request = generate((first, second)[number % 2], prompt, 40)
            found = self.cluster.trace(request)
            assert found["kv_backend"] == backend, found
            assert found["kv_bytes"] > 0, found
        return len(asked)

    def deploy(self, config: Mapping[str, Any]) -> None:
        """`serve deploy` of a configuration of this run."""
        self._operator.put(yaml.safe_dump(config), _CONFIG)
        self._run(self._commands.deploy.replace("deploy/cluster-serve.yaml", _CONFIG), _COMMAND_S)

    def deploy_anew(self, config: Mapping[str, Any], replicas: Mapping[str, int]) -> None:
        """`serve deploy` of one whose workers are others. Returns when only the new replicas run."""
        before = {one.id for one in self.cluster.replicas() if one.deployment != "router"}
        self.deploy(config)
        self.cluster.wait_for_replicas(replicas, _SERVE_S, before)

    def down(self) -> list[str]:
        """End everything as README says. Returns descriptions of what is left on the hosts."""
        self._run(self._commands.shutdown, _DOWN_S)
        self._run(self._commands.down, _DOWN_S)
        for host in self.cluster.hosts[1:]:
            self._run(self._commands.stop, _DOWN_S, WORKER_ADDRESS_1=host.address)
        return [left for host in self.cluster.hosts for left in host.leftovers(_LEFT_S)]

    def _run(self, command: str, timeout_s: float, **words: str) -> str:
        return self._operator.run(replaced(command, {**self._words, **words}), timeout_s)


def on(address: str) -> dict[str, Any]:
    """Settings of a deployment whose replicas must be on that host."""
    return {"resources": {f"node:{address}": 0.01}}


def configuration(backend: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """The shipped one, in float32, with that transfer backend and more settings of its sections."""
    config = copy.deepcopy(SHIPPED)
    (application,) = config["applications"]
    arguments = application["args"]
    arguments["worker"].update(dtype="float32", kv_transfer_backend=backend)
    for name, settings in sections.items():
        arguments[name] = {**arguments.get(name, {}), **settings}
    return dict(config)


@contextmanager
def scene(net: Network, folder: Path, packages: Path) -> Iterator[Scene]:
    """Hosts that are on (the third is not part of the cluster yet), in `folder`. All are switched off in the
    end, whatever runs on them."""
    operator = Operator(net, OPERATOR, folder / OPERATOR)
    secret, password = secrets.token_urlsafe(32), secrets.token_hex(16)
    hosts = [Host(net, name, folder / name, operator.public_key) for name in HOSTS]
    redis: subprocess.Popen[bytes] | None = None
    try:
        for host in hosts:
            use_wheels(host.home, packages)
            _write_secrets(host, cluster_secret=secret, redis_password=password)
            host.start()
        redis = _start_redis(operator.address, password, folder)
        words = {
            "HEAD_ADDRESS": hosts[0].address,
            WORKERS: hosts[1].address,
            "WORKER_ADDRESS_1": hosts[1].address,
            "REDIS_ADDRESS": operator.address,
            "ubuntu": "root",
        }
        yield Scene(operator, Cluster(hosts[:2]), hosts[2], words)
    finally:
        for host in hosts:
            host.kill()
        if redis is not None:
            redis.kill()
            redis.wait()


def _write_secrets(host: Host, **files: str) -> None:
    folder = host.etc / "baton"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
        (folder / name).chmod(0o600)


def _start_redis(address: str, password: str, folder: Path) -> subprocess.Popen[bytes]:
    """Redis on this thread's host. Returns when it answers."""
    command = [
        "redis-server",
        "--bind",
        address,
        "--requirepass",
        password,
        "--save",
        "",
        "--dir",
        str(folder),
    ]
    redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    asking = ["redis-cli", "-h", address, "-a", password, "--no-auth-warning", "ping"]
    deadline = time.monotonic() + 10.0
    while subprocess.run(asking, capture_output=True, text=True, check=False).stdout.strip() != "PONG":
        assert time.monotonic() < deadline, "Redis does not answer"
        time.sleep(0.1)
    return redis
