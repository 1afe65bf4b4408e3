"""Checks of each node by itself: address, ports, model files, memory, resources, GPUs, RDMA devices."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import ServeConfig, most_replicas
from cluster.deployments import Deployment
from cluster.doctor.facts import UNLIMITED, Case, Finding, Grade, NodeFacts
from common.host import is_loopback
from wire.options import PortOptions

_MIB, _GIB = 1 << 20, 1 << 30
_LESS_KV = "lower max_total_tokens, store KV in fewer bits (kv_cache_dtype), or use a larger node"
_SOCKETS = {"mailboxes": 1, "events": 4, "kv": 1, "mooncake": 2}  # of one process that needs any


def check_config(case: Case) -> Iterator[Finding]:
    """The configuration is one that Baton on that node accepts."""
    for node in case.nodes:
        if "config" in node.unusable:
            yield _refused("configuration", node, "config")


def check_addresses(case: Case) -> Iterator[Finding]:
    """What `interface` means on each node is an address that the other nodes may be able to use."""
    for node in case.nodes:
        if "interface" in node.unusable:
            yield _refused("address", node, "interface")
        elif len(case.nodes) > 1 and is_loopback(node.address):
            found = f"{node.address} is announced, which no other node can reach"
            yield Finding("address", node.node, Grade.FAULT, found, "set interface: auto")
        else:
            yield Finding("address", node.node, Grade.OK, node.address)


def check_ports(case: Case) -> Iterator[Finding]:
    """Each range has free ports for what may run on one node."""
    processes = _processes(case.config)
    for node in case.nodes:
        for use, ports in node.ports.items():
            said = f"ports.{use} {ports.text}: {ports.free} of {ports.of} free"
            wanted = processes * _SOCKETS[use] if use != "mooncake" or wants_mooncake(case.config) else 0
            if ports.free == 0 or ports.of < wanted:
                short = said if ports.free == 0 else f"{said}, {wanted} may be needed"
                remedy = f"end what listens there (ss -ltnp), or give ports.{use} another, larger range"
                yield Finding("ports", node.node, Grade.FAULT, short, remedy)
            else:
                yield Finding("ports", node.node, Grade.OK, said)


def check_model(case: Case) -> Iterator[Finding]:
    """The model's files are there, whole."""
    if case.config is None:
        return
    for node in case.nodes:
        if "model" in node.unusable:
            yield _refused("model", node, "model")
        elif "download" in node.unusable:
            yield _refused("model", node, "download")._replace(grade=Grade.NOTE)
        else:
            yield Finding("model", node.node, Grade.OK, ", ".join(one.model for one in case.config.served))


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Shared memory holds Ray's object store. Baton's own pools are memory files, which do not count."""
    for node in case.nodes:
        said = f"{_size(node.shm)} in /dev/shm, {_size(node.object_store)} for Ray's object store"
        if node.shm < node.object_store:
            remedy = (
                "enlarge it (docker: --shm-size; Kubernetes: an emptyDir with medium: Memory; "
                "mount -o remount,size=), or ray start --object-store-memory="
            )
            yield Finding("shared memory", node.node, Grade.FAULT, said, remedy)
        else:
            yield Finding("shared memory", node.node, Grade.OK, said)


def check_gpus(case: Case) -> Iterator[Finding]:
    """Torch computes on a node's GPUs. Where no worker is to use one, it is a note that it cannot."""
    for node in case.nodes:
        if "gpu" in node.unusable:
            grade = Grade.FAULT if _may_use_gpu(case.config, node) else Grade.NOTE
            yield _refused("GPU", node, "gpu")._replace(grade=grade)
        else:
            yield Finding("GPU", node.node, Grade.OK, ", ".join(map(_size, node.gpu_memory)) or "none")


def check_memory(case: Case) -> Iterator[Finding]:
    """A worker's weights and pool fit into the memory of each node, or GPU, where it may run."""
    if case.config is None:
        return
    for node in case.nodes:
        for role, section in case.config.worker_sections().items():
            need = node.needs.get(str(role), 0)
            if not need or (len(case.nodes) > 1 and not _fits(section, node)):
                continue
            there, where, remedy = node.memory, "free", _LESS_KV
            if section.num_gpus > 0 and node.gpu_memory:
                options, largest = case.config.worker_options(role), max(node.gpu_memory)
                share, ranks = options.gpu_memory_utilization, options.tp_size
                there, gpus = ranks * int(largest * share), f"{ranks} GPUs" if ranks > 1 else "a GPU"
                where = f"of {gpus} (its share, {share:g} of {_size(largest)})"
                remedy = f"{_LESS_KV}; or raise gpu_memory_utilization"
            said = f"{role}: weights and KV take {_size(need)}, {_size(there)} {where}"
            grade = Grade.FAULT if need > there else Grade.OK
            yield Finding("memory", node.node, grade, said, remedy if grade is Grade.FAULT else "")


def check_resources(case: Case) -> Iterator[Finding]:
    """There is a node with the GPUs and other resources, and the labels, that a replica asks for."""
    if case.config is None:
        return
    where = case.nodes[0].node if len(case.nodes) == 1 else "all nodes"
    for name, section in _sections(case.config).items():
        yield from _missing(name, section, case, where)
    for node in case.nodes:
        shown = {key: amount for key, amount in node.resources.items() if key in ("CPU", "GPU")}
        said = ", ".join(f"{key} {amount:g}" for key, amount in sorted(shown.items()))
        yield Finding("resources", node.node, Grade.OK, said)


def _missing(name: str, section: Deployment, case: Case, where: str) -> Iterator[Finding]:
    lacking = {
        resource: max(node.resources.get(resource, 0.0) for node in case.nodes)
        for resource, amount in _asked(section).items()
        if not any(_has(node, resource, amount) for node in case.nodes)
    }
    for resource, most in lacking.items():
        amount = _asked(section)[resource]
        key = {"GPU": "num_gpus", "CPU": "num_cpus"}.get(resource, "resources")
        found = f"{name} asks for {resource} {amount:g}, and no node has more than {most:g}"
        remedy = f"lower {name}.{key}, or add such a node (for GPUs: with its driver)"
        if resource.startswith("accelerator_type:"):
            found = f"{name} asks for an accelerator {section.accelerator_type}, and no node has one"
            remedy = f"correct {name}.accelerator_type (`ray status -v` lists them), or add such a node"
        yield Finding("resources", where, Grade.FAULT, found, remedy)
    if not lacking and not any(_fits(section, node) for node in case.nodes):
        found = f"no node has all that {name} asks for: {_asked(section)} and the labels {section.labels}"
        remedy = f"correct {name}.labels, or start Ray with them (ray start --labels)"
        yield Finding("resources", where, Grade.FAULT, found, remedy)


def check_rdma(case: Case) -> Iterator[Finding]:
    """What RDMA needs, where there are devices or Mooncake was asked for."""
    for node in case.nodes:
        devices = ", ".join(node.rdma_devices) or "no device"
        if node.rdma_devices and node.locked_memory != UNLIMITED:
            found = f"{devices}; at most {_size(node.locked_memory)} may be locked"
            remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1), or kv_transfer_backend: tcp"
            grade = Grade.FAULT if wants_mooncake(case.config) else Grade.NOTE
            yield Finding("RDMA", node.node, grade, found, remedy)
        elif not node.rdma_devices and wants_mooncake(case.config):
            found = "no RDMA device: Mooncake moves pages over TCP, in the clear and slower than tcp does"
            remedy = "give the container its devices (/dev/infiniband), or kv_transfer_backend: auto"
            yield Finding("RDMA", node.node, Grade.NOTE, found, remedy)
        else:
            yield Finding("RDMA", node.node, Grade.OK, devices)


def uses_to_try(config: ServeConfig | None, rdma: bool) -> list[str]:
    """The uses of ports whose ranges the preflight tries: Mooncake's only where it may be used."""
    used = wants_mooncake(config) or (rdma and config is not None and "auto" in _backends(config))
    return [use for use in PortOptions.model_fields if use != "mooncake" or used]


def wants_mooncake(config: ServeConfig | None) -> bool:
    """Whether a role has to use Mooncake."""
    return config is not None and "mooncake" in _backends(config)


def _backends(config: ServeConfig) -> set[str]:
    return {config.worker_options(role).kv_transfer_backend for role in config.worker_sections()}


def _may_use_gpu(config: ServeConfig | None, node: NodeFacts) -> bool:
    """Whether a worker on this node takes its GPU. Without a configuration any may."""
    if config is None:
        return True
    options = [
        config.worker_options(key) for key, one in config.worker_sections().items() if _fits(one, node)
    ]
    return any(one.device != "cpu" and one.engine != "fake" for one in options)


def _refused(check: str, node: NodeFacts, subject: str) -> Finding:
    why = node.unusable[subject]
    return Finding(check, node.node, Grade.FAULT, why.problem, why.remedy)


def _sections(config: ServeConfig) -> dict[str, Deployment]:
    return {"router": config.router, **{str(role): one for role, one in config.worker_sections().items()}}


def _asked(section: Deployment) -> dict[str, float]:
    """What a replica reserves, and the sliver of a resource by which Ray finds an accelerator."""
    kind = {f"accelerator_type:{section.accelerator_type}": 0.001} if section.accelerator_type else {}
    return {"GPU": section.num_gpus, "CPU": section.num_cpus, **section.resources, **kind}


def _has(node: NodeFacts, resource: str, amount: float) -> bool:
    """Whether a node has so much of a resource. Without Ray only CPUs and GPUs are counted."""
    known = node.labels is not None or resource in ("CPU", "GPU")
    return not known or node.resources.get(resource, 0.0) >= amount


def _fits(section: Deployment, node: NodeFacts) -> bool:
    enough = all(_has(node, name, amount) for name, amount in _asked(section).items())
    if node.labels is None:  # without Ray there are none
        return enough
    return enough and all(_matches(wanted, node.labels.get(key)) for key, wanted in section.labels.items())


def _matches(wanted: str, label: str | None) -> bool:
    """As Ray's label selectors: a value, in(a, b), or one of these after a `!`."""
    plain = wanted.removeprefix("!")
    listed = plain.removeprefix("in(").removesuffix(")") if plain.startswith("in(") else plain
    return (label in [one.strip() for one in listed.split(",")]) != wanted.startswith("!")


def _processes(config: ServeConfig | None) -> int:
    """That may run on one node, at worst all."""
    if config is None:
        return 1
    workers = sum(most_replicas(section) for section in config.worker_sections().values())
    return workers + most_replicas(config.router) + 1  # and the directory


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.1f} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.0f} MiB"
