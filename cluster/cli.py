"""`baton`: serve a model on Ray Serve, look into its caches, replay a trace through its router, or print what
a configuration may contain.

    baton serve MODEL|CONFIG.yaml [options]     baton tree [WORKER ...]
    baton replay TRACE [options]                baton config --schema
    baton --version

Exit codes: 0 ended on request; 1 could not be started, or does not answer; 2 a configuration that cannot
work (one line on stderr that names the key and the remedy, and nothing is left running).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import yaml

from cluster.app import build
from cluster.config import json_schema, most_replicas, parse_config, read_config
from cluster.local import (
    DeployFailed,
    LocalOptions,
    LocalServe,
    check_port_free,
    running_ray,
    stop_on_signals,
)
from cluster.model_files import model_directory
from cluster.replay import HELP as REPLAY_HELP
from cluster.replay import add_replay
from cluster.tree import TreeSource
from common.errors import ConfigError, WorkerLost
from common.options import exit_on_config_error
from kvcache.eviction import POLICIES

DISTRIBUTION = "baton-serve"
INTERRUPTED_EXIT = 130  # 128 + SIGINT, as shells have it
_READY_TIMEOUT_S = 1800.0  # a large model takes its time to load
_WORKER_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "page_size": (int, "tokens of a KV page, a power of two"),
    "max_total_tokens": (int, "KV capacity of a worker in tokens"),
    "swa_full_tokens_ratio": (float, "capacity for sliding-window layers, as a share of max_total_tokens"),
    "max_mamba_cache_size": (int, "states of linear attention or Mamba that a worker keeps"),
    "mamba_track_interval": (int, "tokens between the states that decode keeps"),
    "max_context_tokens": (int, "longest prompt + output"),
    "chunked_prefill_size": (int, "tokens of a prefill chunk"),
    "dtype": (str, "auto, float32 or bfloat16"),
    "kv_cache_dtype": (str, "how KV is stored: auto, fp8_e4m3, fp8_e5m2 or fp4_e2m1"),
    "eviction_policy": (str, "which cached prefix goes first: " + ", ".join(POLICIES)),
    "threads": (int, "compute threads of a worker"),
    "kv_transfer_backend": (str, "auto, shm, tcp or mooncake"),
    "kv_events_config": (yaml.safe_load, "KV events as JSON or YAML, for example '{enable: false}'"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns its exit code."""
    arguments = _parser().parse_args(argv)
    with exit_on_config_error("baton"):
        try:
            return int(arguments.run(arguments))
        except KeyboardInterrupt:  # before the signal handlers were there; what had started has been ended
            return INTERRUPTED_EXIT


def make_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration that MODEL or CONFIG.yaml and the flags describe; flags win."""
    raw = _base_config(arguments.target)
    flags = {
        "served_model_name": arguments.served_model_name,
        "prefill.num_replicas": arguments.num_prefill,
        "decode.num_replicas": arguments.num_decode,
        **{f"worker.{key}": getattr(arguments, key) for key in _WORKER_FLAGS},
    }
    for path, value in flags.items():
        if value is not None:
            _put(raw, path, value)
    for assignment in arguments.set:
        _assign(raw, assignment)
    return raw


def _base_config(target: str) -> dict[str, Any]:
    if target.endswith((".yaml", ".yml")):
        return read_config(Path(target))
    return {"model": target}


def _assign(raw: dict[str, Any], assignment: str) -> None:
    """`a.b.c=value` into nested mappings; the value is YAML."""
    path, equals, value = assignment.partition("=")
    if not equals or not path:
        raise ConfigError("--set", f"{assignment!r} is not KEY=VALUE", "for example --set decode.drain_s=30")
    try:
        _put(raw, path, yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ConfigError(path, f"{value!r} is not YAML: {error}", "correct the value") from None


def _put(raw: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted key, making the sections on the way."""
    *parents, last = path.split(".")
    at = raw
    for parent in parents:
        if at.get(parent) is None:
            at[parent] = {}
        at = at[parent]
        if not isinstance(at, dict):
            raise ConfigError(path, f"{parent} is not a section", "see `baton config --schema`")
    at[last] = value


def _serve(arguments: argparse.Namespace) -> int:
    raw = make_config(arguments)
    config = parse_config(raw)
    address = arguments.ray_address or running_ray()
    if address is None:  # our own Ray on this machine: what can be checked here is checked before it starts
        check_port_free(arguments.host, arguments.port)
        raw = {**raw, "model": str(model_directory(config.model)), "served_model_name": config.name}
        _share_machine(raw)
        config = parse_config(raw)
    options = LocalOptions(
        host=arguments.host,
        port=arguments.port,
        ray_address=address,
        cpus=config.cpus(),
        shutdown_s=config.shutdown_s(),
        worker_logs=arguments.worker_logs,
    )
    print(f"starting {config.name} on {'a local Ray' if address is None else f'Ray at {address}'} ...")
    with LocalServe(options) as local:
        stop = stop_on_signals()
        try:
            local.deploy(build(raw), _READY_TIMEOUT_S, stop)
        except DeployFailed as failure:
            print(f"baton: {failure}", file=sys.stderr)
            return 1
        if not stop.is_set():
            print(f"ready: {options.url}/v1  (model {config.name}; Ctrl-C to stop)", flush=True)
            stop.wait()
        print("draining and shutting down ...", flush=True)
    print("stopped")
    return 0


def _share_machine(raw: dict[str, Any]) -> None:
    """Give the workers of this machine its cores and GPUs, unless the configuration says otherwise.

    Ray hides the GPUs from a replica that has not asked for any.
    """
    config = parse_config(raw)
    sections = (
        {"decode": config.decode}
        if config.colocated
        else {"prefill": config.prefill, "decode": config.decode}
    )
    workers = sum(most_replicas(section) for section in sections.values())
    if not any(
        "threads" in options for options in (config.worker, config.prefill.options, config.decode.options)
    ):
        _put(raw, "worker.threads", max(1, (os.cpu_count() or 1) // workers))
    gpus = _gpus()
    if gpus and not any(section.num_gpus for section in sections.values()):
        for name in sections:
            _put(raw, f"{name}.num_gpus", min(1.0, gpus / workers))


def _gpus() -> int:
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _config(arguments: argparse.Namespace) -> int:
    if arguments.check is not None:
        parse_config(read_config(arguments.check))
        print(f"{arguments.check}: ok")
    else:
        print(json.dumps(json_schema(), indent=2))
    return 0


def _tree(arguments: argparse.Namespace) -> int:
    source = TreeSource(arguments.url, arguments.cluster_secret, arguments.interface)
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


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown (not installed)"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="baton", description="Serve a language model with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="serve a model until Ctrl-C", description=_SERVE_HELP))
    _add_tree(commands.add_parser("tree", help="show what live workers cache", description=_TREE_HELP))
    add_replay(commands.add_parser("replay", help="replay a trace in virtual time", description=REPLAY_HELP))
    config = commands.add_parser("config", help="what a configuration may contain")
    what = config.add_mutually_exclusive_group(required=True)
    what.add_argument("--schema", action="store_true", help="print the JSON schema")
    what.add_argument("--check", metavar="CONFIG.yaml", type=Path, help="check a file and start nothing")
    config.set_defaults(run=_config)
    return parser


_SERVE_HELP = (
    "Start a local Ray if none is running, serve MODEL on it, and shut down on Ctrl-C whatever was started. "
    "MODEL is a directory or a Hugging Face id; a YAML file can say everything (baton config --schema)."
)


def _add_serve(serve: argparse.ArgumentParser) -> None:
    serve.add_argument(
        "target", metavar="MODEL|CONFIG.yaml", help="model directory, hub id, or configuration"
    )
    serve.add_argument(
        "--num-prefill", type=int, metavar="N", help="prefill workers; 0: colocated (default 1)"
    )
    serve.add_argument("--num-decode", type=int, metavar="N", help="decode workers (default 1)")
    serve.add_argument("--host", default="127.0.0.1", help="where HTTP listens (default %(default)s)")
    serve.add_argument("--port", type=int, default=8000, help="where HTTP listens (default %(default)s)")
    serve.add_argument("--served-model-name", metavar="NAME", help="name in the API (default: from MODEL)")
    for key, (kind, text) in _WORKER_FLAGS.items():
        serve.add_argument(f"--{key.replace('_', '-')}", type=kind, metavar="X", help=f"{text} (both roles)")
    serve.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any configuration key, dotted"
    )
    serve.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="a Ray on this machine to run on (default: RAY_ADDRESS, or what runs)",
    )
    serve.add_argument("--worker-logs", action="store_true", help="show the logs of all replicas")
    serve.set_defaults(run=_serve)


_TREE_HELP = (
    "Print the prefix tree of each WORKER of a running Baton, or of all: per node its tokens, what each kind "
    "of KV keeps there, locks and hits. WORKER is an id (/debug/workers lists them) or a mailbox address, "
    "tcp://HOST:PORT."
)


def _add_tree(tree: argparse.ArgumentParser) -> None:
    tree.add_argument("workers", metavar="WORKER", nargs="*", help="default: every worker of the router")
    tree.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the router's HTTP address (default %(default)s)"
    )
    tree.add_argument("--json", action="store_true", help="print the nodes as JSON, with all their tokens")
    tree.add_argument("--cluster-secret", metavar="SECRET", help="the cluster's, to ask an address")
    tree.add_argument(
        "--interface", default="127.0.0.1", help="where an address reaches us back (default %(default)s)"
    )
    tree.set_defaults(run=_tree)


if __name__ == "__main__":
    sys.exit(main())
