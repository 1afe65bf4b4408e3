"""The command `baton serve`."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from cluster.config import DYNAMIC, ServeConfig, most_replicas, parse_config
from cluster.configuration_arguments import add_set, base_config, unused
from cluster.model_files import model_directory
from cluster.own_session import leave_session
from common.gpus import gpus_found
from common.host import HTTP_PORT, LOOPBACK
from common.settings import assign, parse_value, put
from router.options import OutputOptions, RouterSettings
from wire.options import ServedModel
from worker.options import WorkerSettings

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
    "tp_size",
    "dtype",
    "weight_dtype",
    "kv_cache_dtype",
    "eviction_policy",
    "threads",
    "kv_transfer_backend",
    "kv_events_config",
)
"""Worker options that have a flag of their own; every other needs `--set worker.KEY=VALUE`."""


HELP = (
    "Start a Ray on this machine, serve MODEL on it, and on Ctrl-C or SIGTERM drain and end both. "
    "MODEL is a directory or a Hugging Face id; a YAML file can set every key (baton config --schema). "
    "While all decode workers are full, requests wait up to 5 s and then get a 429: "
    "--set router.options.max_queue_s=60 lets them wait longer."
)


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Its arguments."""
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
    serve.add_argument(
        "--pooling", metavar="last|mean", help=RouterSettings.model_fields["pooling"].description
    )
    for key, field in OutputOptions.model_fields.items():
        serve.add_argument(_flag(key), metavar="X", help=field.description)
    serve.add_argument(
        "--metrics-compat", metavar="X", help=RouterSettings.model_fields["metrics_compat"].description
    )
    for key in _WORKER_FLAGS:
        description = WorkerSettings.model_fields[key].description
        serve.add_argument(_flag(key), metavar="X", help=f"{description} (both roles)")
    add_set(serve)
    serve.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="run on this Ray instead, and leave it running; auto: the one that this machine runs (default: "
        "RAY_ADDRESS)",
    )
    serve.add_argument("--worker-logs", action="store_true", help="show the logs of all replicas")
    serve.set_defaults(run=_serve)


def make_config(arguments: argparse.Namespace) -> dict[str, Any]:
    """The configuration that MODEL or CONFIG.yaml and the flags describe; flags win."""
    raw = base_config(arguments.target)
    flags = {
        "roles": None if arguments.num_workers is None else DYNAMIC,
        "dynamic.num_replicas": arguments.num_workers,
        "served_model_name": arguments.served_model_name,
        "generation_config": arguments.generation_config,
        "router.options.pooling": arguments.pooling,
        **{key: getattr(arguments, key) for key in OutputOptions.model_fields},
        "router.options.metrics_compat": arguments.metrics_compat,
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


def _serve(arguments: argparse.Namespace) -> int:
    config = parse_config(make_config(arguments))
    if kept := unused(arguments.target):
        told = f"only `serve run` uses {', '.join(kept)} of it"
        print(f"baton: {arguments.target} is a Serve config, and {told}", file=sys.stderr)
    # Here, because they load Ray Serve: what is wrong with the arguments is said seconds sooner.
    from cluster.local import LocalOptions, check_port_free
    from cluster.serving import serve_until_stopped

    address = arguments.ray_address or os.environ.get("RAY_ADDRESS") or None
    if address in (None, "local"):  # what can be checked is checked before a Ray is started
        address = None
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
    code = leave_session()
    return serve_until_stopped(options, config) if code is None else code


def _check_models(config: ServeConfig) -> None:
    from cluster.served_models import check_models  # loads transformers: not needed if a Ray runs

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
    if all(options.threads is None for options in said):
        threads = max(1, (os.cpu_count() or 1) // workers)
        changes["worker"] = config.worker.model_copy(update={"threads": threads})
    gpus = len(gpus_found())
    if gpus and not config.models and not any(section.num_gpus for section in sections.values()):
        options = {key: config.worker_options(key) for key in sections}
        ranks = {key: 1 if one.device == "cpu" else one.tp_size for key, one in options.items()}
        if max(ranks.values()) > 1:
            shares = {key: float(count) for key, count in ranks.items()}
        else:  # Ray looks for the whole share on one GPU: of three workers on two, each has a half.
            shares = dict.fromkeys(sections, 1.0 / -(-workers // gpus))
        changes |= {
            key: section.model_copy(update={"num_gpus": shares[key]}) for key, section in sections.items()
        }
    return config.model_copy(update=changes)
