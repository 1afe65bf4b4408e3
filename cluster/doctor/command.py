"""The command `baton doctor`."""

from __future__ import annotations

import argparse
import secrets
from typing import Any

import ray

from cluster.config import parse_config
from cluster.configuration_arguments import add_set, base_config
from cluster.doctor.checks import judge
from cluster.doctor.facts import Case, Grade
from cluster.doctor.gather import node_name
from cluster.doctor.nodes import examine, examine_here
from cluster.doctor.report import print_json, print_table
from cluster.running import connect_ray, running_ray
from common.errors import ConfigError
from common.settings import assign

HELP = (
    "Check versions, clocks, addresses, ports, secret, model files, resources, GPUs, memory and RDMA "
    "devices: of this node, without Ray; with --cluster or --ray-address of every node of a Ray cluster, "
    "and that the nodes reach each other. Exit code 0: nothing is wrong; 1: something is, and the table "
    "says what to do."
)


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    """Its arguments."""
    doctor.add_argument(
        "target",
        metavar="CONFIG.yaml",
        nargs="?",
        help="the configuration to be served (as for serve); without it, only the machine is checked",
    )
    doctor.add_argument("--cluster", action="store_true", help="every node of the Ray that runs here")
    doctor.add_argument("--ray-address", metavar="ADDRESS", help="every node of the Ray there")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_set(doctor)
    doctor.set_defaults(run=_doctor)


def _doctor(arguments: argparse.Namespace) -> int:
    raw = None if arguments.target is None else base_config(arguments.target)
    for assignment in arguments.set:
        if raw is None:
            raise ConfigError("--set", "there is no configuration to change", "give CONFIG.yaml")
        assign(raw, assignment)
    return run_doctor(arguments, raw)


def run_doctor(arguments: argparse.Namespace, raw: dict[str, Any] | None) -> int:
    """Examine, judge, print. Returns the exit code. Raises ConfigError for a configuration that cannot work
    anywhere, and when there is no Ray."""
    config = None if raw is None else parse_config(raw)
    challenge = secrets.token_bytes(16)  # digests of the secret are worth nothing after this run
    if arguments.cluster or arguments.ray_address:
        connect_ray(_ray(arguments))
        try:
            examined = examine(raw, challenge)
        finally:
            ray.shutdown()
    else:
        examined = examine_here(raw, challenge, node_name())
    case = Case(examined.nodes, examined.reaches, config)
    found = [*examined.lost, *(judge(case) if case.nodes else [])]
    (print_json if arguments.json else print_table)(found)
    return int(any(one.grade is Grade.FAULT for one in found))


def _ray(arguments: argparse.Namespace) -> str:
    address = arguments.ray_address or running_ray()
    if address is None:
        remedy = "give --ray-address, or run without --cluster"
        raise ConfigError("--cluster", "no Ray runs on this machine", remedy)
    return str(address)
