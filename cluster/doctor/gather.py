"""The facts of this node."""

from __future__ import annotations

import hashlib
import hmac
import os
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import common
from cluster.config import OBJECT_STORE_BYTES, ServeConfig, parse_config
from cluster.doctor.facts import UNLIMITED, NodeFacts, PortsFree, Problem
from cluster.doctor.gpu_probe import gpu_problem
from cluster.doctor.model_check import present_files
from common.errors import ConfigError
from common.gpus import gpus_found
from common.host import AUTO, local_address
from common.memory import available_memory
from common.ports import ANY_PORT, Ports, bind_free
from common.secrets import open_secret
from wire.options import PortOptions, SocketOptions

_PACKAGES = {
    "Ray": ("ray",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "Mooncake": (
        "mooncake-transfer-engine-non-cuda",
        "mooncake-transfer-engine",
        "mooncake-transfer-engine-cuda13",
    ),
}
"""What the report calls it, and the distributions of which one has it."""

_SOURCES = (
    "cluster", "common", "decode_node", "engine", "kvcache", "kvtransfer", "prefill_node", "router",
    "scaling", "scheduler", "wire", "worker",
)  # fmt: skip
_SUFFIXES = (".py", ".cpp", ".h")
_ROOT = Path(common.__file__).parent.parent
_NVIDIA_SMI_S = 20.0


def gather(node: str, raw: dict[str, Any] | None, challenge: bytes, address: str = "") -> NodeFacts:
    """Look at this node. `raw`: the configuration to be served, if there is one; it is parsed here, because
    another node may have another Baton. `address`: what `interface: auto` means, if the caller knows.

    What cannot be used is in `unusable`: nothing is raised.
    """
    unusable: dict[str, Problem] = {}
    config: ServeConfig | None = None
    with _noted("config", unusable):
        config = None if raw is None else parse_config(raw)
    sockets = SocketOptions() if config is None else config
    reached_at = ""
    with _noted("interface", unusable):
        reached_at = _bindable(
            address if address and sockets.interface == AUTO else local_address(sockets.interface)
        )
    digests: tuple[str, ...] = ()
    with _noted("secret", unusable):
        digests = _digests(sockets.cluster_secret_file, challenge)
    if gpus_found() and (problem := gpu_problem()) is not None:
        unusable["gpu"] = problem
    memory, gpu_memory = available_memory(), _gpu_memory()
    needs: dict[str, int] = {}
    with _noted("model", unusable):
        needs = {} if config is None else _needs(config, unusable, memory, bool(gpu_memory))
    return NodeFacts(
        node=node,
        versions=_versions(),
        address=reached_at,
        memory=memory,
        shm=_size_of("/dev/shm"),  # noqa: S108 - its size is asked
        object_store=OBJECT_STORE_BYTES,
        resources={"CPU": float(os.cpu_count() or 1), "GPU": float(len(gpus_found()))},
        gpu_memory=gpu_memory,
        rdma_devices=rdma_devices(),
        locked_memory=_locked_memory(),
        ports=_ports(reached_at, sockets.ports),
        secret_digests=digests,
        needs=needs,
        unusable=unusable,
    )


def node_name() -> str:
    """What this node is called where Ray does not say it."""
    return socket.gethostname()


def rdma_devices() -> tuple[str, ...]:
    """Names of the InfiniBand and RoCE devices."""
    devices = Path("/sys/class/infiniband")
    return tuple(sorted(path.name for path in devices.iterdir())) if devices.is_dir() else ()


@contextmanager
def _noted(subject: str, unusable: dict[str, Problem]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        unusable[subject] = Problem(error.problem, error.remedy)


def _versions() -> dict[str, str]:
    baton = f"{_installed('baton-serve')} {source_digest()}".strip()
    found = {"Python": platform.python_version(), "Baton": baton}
    for name, distributions in _PACKAGES.items():
        found[name] = next(filter(None, map(_installed, distributions)), "")
    return found


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def source_digest(root: Path = _ROOT) -> str:
    """Of the sources in `root`: two checkouts of one version may differ, and their messages, too."""
    digest = hashlib.sha256()
    found = (path for name in _SOURCES for path in (root / name).rglob("*"))
    for path in sorted(path for path in found if path.suffix in _SUFFIXES):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _bindable(address: str) -> str:
    """The address. Raises ConfigError when it is none of this node."""
    with socket.socket() as probe:
        bind_free(ANY_PORT, address, lambda port: probe.bind((address, port)))
    return address


def _digests(path: Path | None, challenge: bytes) -> tuple[str, ...]:
    secret = open_secret(path)
    if secret is None:
        return ()
    return tuple(hmac.digest(challenge, one, "sha256").hex()[:16] for one in secret.accepted)


def _needs(config: ServeConfig, unusable: dict[str, Problem], free: int, gpus: bool) -> dict[str, int]:
    """Raises ConfigError for a model that cannot be used."""
    if all(config.worker_options(role).engine == "fake" for role in config.worker_sections()):
        return {}
    found = {one.model: present_files(one.model) for one in config.served}
    directories = {model: directory for model, directory in found.items() if directory is not None}
    if len(directories) < len(found):
        missing = ", ".join(model for model in found if model not in directories)
        problem = f"this node has not downloaded {missing}"
        unusable["download"] = Problem(
            problem, "wait for it at the first start, or mount a cache that has it"
        )
        return {}
    from cluster.doctor.memory import worker_bytes  # torch takes seconds to import

    return {
        key: worker_bytes(
            config.worker_options(key),
            directories[config.model_of(key).model],
            None if section.num_gpus > 0 and gpus else free,
        )
        for key, section in config.worker_sections().items()
    }


def _ports(host: str, ports: PortOptions) -> dict[str, PortsFree]:
    """Of ranges that are given. Without an address nothing can be bound."""
    named = {use: ports.of(use) for use in PortOptions.model_fields}
    return {
        use: PortsFree(one.text, _free(host, one), len(one.choice))
        for use, one in named.items()
        if host and not one.any_free
    }


def _free(host: str, ports: Ports) -> int:
    free = 0
    for port in ports.choice:
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            free += 1
    return free


def _size_of(path: str) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def _locked_memory() -> int:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return UNLIMITED if limit == resource.RLIM_INFINITY else limit


def _gpu_memory() -> tuple[int, ...]:
    """As NVIDIA's own program says it: torch sees no GPU in a process that has not reserved one."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    asked = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):  # a driver that does not answer: the GPUs are counted alone
        return ()
    return tuple(int(line) << 20 for line in done.stdout.split() if line.isdigit())
