"""`baton`: serve a model on Ray Serve, check nodes for it, show its caches, show and set its workers' roles,
replay a trace through its router, or print the schema of the configuration.

    baton serve MODEL|CONFIG.yaml [options]     baton tree [WORKER ...]
    baton replay TRACE [options]                baton roles [WORKER=ROLE ...]
    baton doctor [CONFIG.yaml] [--cluster]      baton config --schema
    baton --version

Exit codes: 0 done, or ended on request; 1 could not be started, does not answer, or the doctor found a fault;
2 a configuration that cannot work (one line on stderr names the key, the problem and the remedy; nothing is
left running).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cluster.admin_page import add_admin_arguments, read_admin_key
from cluster.app import application
from cluster.config import DYNAMIC, ServeConfig, most_replicas, parse_config, read_config
from cluster.doctor.command import HELP as DOCTOR_HELP
from cluster.doctor.command import add_doctor, run_doctor
from cluster.local import (
    DeployFailed,
    LocalOptions,
    LocalServe,
    check_port_free,
    find_admin_listener,
    running_ray,
    stop_on_signals,
)
from cluster.model_files import model_directory
from cluster.replay import HELP as REPLAY_HELP
from cluster.replay import add_replay
from cluster.roles_command import HELP as ROLES_HELP
from cluster.roles_command import add_roles
from cluster.top import HELP as TOP_HELP
from cluster.top import add_top
from cluster.tree import ADDRESS, TreeSource
from common.arguments import ExactParser
from common.errors import ConfigError, WorkerLost
from common.gpus import gpus_found
from common.host import HTTP_PORT, LOOPBACK
from common.options import exit_on_config_error
from common.secrets import SECRET_VARIABLE, open_secret
from common.settings import assign, parse_value, put
from wire.options import ServedModel
from worker.options import WorkerSettings

DISTRIBUTION = "baton-serve"
INTERRUPTED_EXIT = 130  # 128 + SIGINT, as in shells
_READY_TIMEOUT_S = 1800.0  # large models load slowly
_WORKER_FLAGS = (
    "page_size",
    "max_total_tokens",
    "gpu_memory_utilization",
    "swa_full_tokens_ratio",
    "max_mamba_cache_size",
    "mamba_track_interval",
    "max_context_tokens",
    "chunked_prefill_size",
    "device",
    "dtype",
    "weight_dtype",
    "kv_cache_dtype",
    "eviction_policy",
    "threads",
    "kv_transfer_backend",
    "kv_events_config",
)
"""Worker options that have a flag of their own; every other needs `--set worker.KEY=VALUE`."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns its exit code."""
    arguments = _parser().parse_args(argv)
    with exit_on_config_error("baton"):
        try:
            return int(arguments.run(arguments))
        except KeyboardInterrupt:  # before the signal handlers were installed; everything has been ended
            return INTERRUPTED_EXIT


def make_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration that MODEL or CONFIG.yaml and the flags describe; flags win."""
    raw = _base_config(arguments.target)
    flags = {
        "roles": None if arguments.num_workers is None else DYNAMIC,
        "dynamic.num_replicas": arguments.num_workers,
        "served_model_name": arguments.served_model_name,
        "generation_config": arguments.generation_config,
        "prefill.num_replicas": arguments.num_prefill,
        "decode.num_replicas": arguments.num_decode,
    }
    for path, value in flags.items():
        if value is not None:
            put(raw, path, value)
    for key in _WORKER_FLAGS:
        text = getattr(arguments, key)
        if text is not None:
            put(raw, f"worker.{key}", parse_value(_flag(key), text))
    for assignment in arguments.set:
        assign(raw, assignment)
    return raw


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _base_config(target: str) -> dict[str, Any]:
    if target.endswith((".yaml", ".yml")):
        return read_config(Path(target))
    return {"model": target}


def _serve(arguments: argparse.Namespace) -> int:
    config = parse_config(make_config(arguments))
    address = arguments.ray_address or running_ray()
    if address is None:  # a Ray is started on this machine: what can be checked is checked before
        check_port_free(arguments.host, arguments.port)
        config = share_machine(with_files(config))
        _check_models(config)
    options = LocalOptions(
        host=arguments.host,
        port=arguments.port,
        ray_address=address,
        cpus=config.cpus(),
        shutdown_s=config.shutdown_s(),
        worker_logs=arguments.worker_logs,
    )
    served = ", ".join(sorted({one.model_name for one in config.served}))
    print(f"starting {served} on {'a local Ray' if address is None else f'Ray at {address}'} ...")
    with LocalServe(options) as local:
        stop = stop_on_signals()
        try:
            local.deploy(application(config), _READY_TIMEOUT_S, stop)
        except DeployFailed as failure:
            print(f"baton: {failure}", file=sys.stderr)
            return 1
        if not stop.is_set():
            print(f"ready: {options.url}/v1  (model {served}; Ctrl-C to stop)", flush=True)
            stop.wait()
        print("draining and shutting down ...", flush=True)
    print("stopped")
    return 0


def _check_models(config: ServeConfig) -> None:
    from cluster.served_models import check_models  # loads transformers, which other commands do not need

    check_models(config)


def with_files(config: ServeConfig) -> ServeConfig:
    """The configuration with directories of this machine as its models. Raises ConfigError."""
    if not config.models:
        found = {"model": str(model_directory(config.model)), "served_model_name": config.model_name}
        return config.model_copy(update=found)
    models = [
        one.model_copy(update={"model": str(model_directory(one.model)), "served_model_name": one.model_name})
        for one in config.models
    ]
    return config.model_copy(update={"models": tuple(models)})


def share_machine(config: ServeConfig) -> ServeConfig:
    """The configuration, with this machine's cores and GPUs shared among its workers where it says nothing.

    Ray hides the GPUs from a replica that has not asked for any.
    """
    sections = config.worker_sections()
    workers = sum(most_replicas(section) for section in sections.values())
    changes: dict[str, Any] = {}
    said = [config.worker, *(one.worker for one in config.served)]
    said += [section.options for section in sections.values()]
    if not any("threads" in options.model_fields_set for options in said):
        threads = max(1, (os.cpu_count() or 1) // workers)
        changes["worker"] = config.worker.model_copy(update={"threads": threads})
    gpus = len(gpus_found())
    if gpus and not config.models and not any(section.num_gpus for section in sections.values()):
        share = {"num_gpus": min(1.0, gpus / workers)}
        changes |= {key: section.model_copy(update=share) for key, section in sections.items()}
    return config.model_copy(update=changes)


def _config(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        parse_config(read_config(arguments.check))
        print(f"{arguments.check}: ok")
    else:
        print(json.dumps(ServeConfig.model_json_schema(), indent=2))
    return 0


def _tree(arguments: argparse.Namespace) -> int:
    named = bool(arguments.workers) and all(one.startswith(ADDRESS) for one in arguments.workers)
    url = arguments.url or ("" if named else find_admin_listener())
    key = read_admin_key(arguments.admin_key_file)
    secret = open_secret(arguments.cluster_secret_file)
    source = TreeSource(url, key, secret, arguments.interface)
    try:
        reports = source.report(arguments.workers, "nodes" if arguments.json else "tree")
    except WorkerLost as lost:
        print(f"baton: {lost}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({worker: json.loads(report) for worker, report in reports.items()}))
    else:
        print("\n\n".join(f"{worker}\n{report}" for worker, report in reports.items()))
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    raw = None if arguments.target is None else _base_config(arguments.target)
    for assignment in arguments.set:
        if raw is None:
            raise ConfigError("--set", "there is no configuration to change", "give CONFIG.yaml")
        assign(raw, assignment)
    return run_doctor(arguments, raw)


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown (not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = ExactParser(
        prog="baton", description="Serve a language model with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model until Ctrl-C", description=_SERVE_HELP))
    _add_tree(commands.add_parser("tree", help="show what live workers cache", description=_TREE_HELP))
    add_top(commands.add_parser("top", help="watch the fleet", description=TOP_HELP))
    add_replay(commands.add_parser("replay", help="replay a trace in virtual time", description=REPLAY_HELP))
    add_roles(
        commands.add_parser("roles", help="show and set who prefills and decodes", description=ROLES_HELP)
    )
    doctor = commands.add_parser(
        "doctor", help="check the nodes for a configuration", description=DOCTOR_HELP
    )
    add_doctor(doctor)
    _add_set(doctor)
    doctor.set_defaults(run=_doctor)
    config = commands.add_parser("config", help="what a configuration may contain")
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--schema", action="store_true", help="print the JSON schema")
    what.add_argument("--check", metavar="CONFIG.yaml", type=Path, help="check a file and start nothing")
    config.set_defaults(run=_config)
    return parser


_SERVE_HELP = (
    "Start a local Ray if none is running, serve MODEL on it, and on Ctrl-C end what was started. "
    "MODEL is a directory or a Hugging Face id; a YAML file can set every key (baton config --schema). "
    "While all decode workers are full, requests wait up to 5 s and then get a 429: "
    "--set router.options.max_queue_s=60 lets them wait longer."
)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "target", metavar="MODEL|CONFIG.yaml", help="model directory, hub id, or configuration"
    )
    serve.add_argument(
        "--num-prefill", type=int, metavar="N", help="prefill workers; 0: colocated (default 1)"
    )
    serve.add_argument("--num-decode", type=int, metavar="N", help="decode workers (default 1)")
    serve.add_argument(
        "--num-workers", type=int, metavar="N", help="N workers whose roles follow the load, instead of both"
    )
    serve.add_argument("--host", default=LOOPBACK, help="where HTTP listens (default %(default)s)")
    serve.add_argument("--port", type=int, default=HTTP_PORT, help="where HTTP listens (default %(default)s)")
    serve.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: from MODEL)")
    serve.add_argument(
        "--generation-config", metavar="X", help=ServedModel.model_fields["generation_config"].description
    )
    for key in _WORKER_FLAGS:
        description = WorkerSettings.model_fields[key].description
        serve.add_argument(_flag(key), metavar="X", help=f"{description} (both roles)")
    _add_set(serve)
    serve.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="a Ray on this machine to run on (default: RAY_ADDRESS, or what runs)",
    )
    serve.add_argument("--worker-logs", action="store_true", help="show the logs of all replicas")
    serve.set_defaults(run=_serve)


def _add_set(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any configuration key, dotted"
    )


_TREE_HELP = (
    "Print the prefix tree of each WORKER of a running Baton, or of all: per node its tokens, what each kind "
    "of KV keeps there, locks and hits. WORKER is an id (/debug/workers of the admin listener lists them) or "
    "a mailbox address, tcp://HOST:PORT."
)


def _add_tree(tree: argparse.ArgumentParser) -> None:
    tree.add_argument("workers", metavar="WORKER", nargs="*", help="default: every worker of the router")
    add_admin_arguments(tree)
    tree.add_argument("--json", action="store_true", help="print the nodes as JSON, with all their tokens")
    tree.add_argument(
        "--cluster-secret-file",
        metavar="FILE",
        type=Path,
        help=f"needed to ask a worker by its address; default: the environment's {SECRET_VARIABLE}",
    )
    tree.add_argument(
        "--interface", default=LOOPBACK, help="local address that the worker answers to (default %(default)s)"
    )
    tree.set_defaults(run=_tree)


if __name__ == "__main__":
    sys.exit(main())
