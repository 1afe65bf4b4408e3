"""`baton`: serve a model on Ray Serve, check nodes for it, show its caches, show and set its workers' roles,
replay a trace through its router, load or talk to a server, or print the schema of the configuration.

    baton serve MODEL|CONFIG.yaml [options]     baton tree [WORKER ...]
    baton replay TRACE [options]                baton roles [WORKER=ROLE ...]
    baton doctor [CONFIG.yaml] [--cluster]      baton config --schema
    baton bench URL [options]                   baton chat [URL] [options]
    baton trace REQUEST [--perfetto FILE]       baton cache [clear] [--worker ID] [--tier TIER]
    baton forget TENANT                         baton top [--once]
    baton --version

Exit codes: 0 done, or ended on request; 1 could not be started, does not answer, or the doctor found a fault;
2 a configuration that cannot work (one line on stderr names the key, the problem and the remedy; nothing is
left running).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from common.arguments import ExactParser
from common.options import exit_on_config_error

DISTRIBUTION = "baton-serve"
INTERRUPTED_EXIT = 130  # 128 + SIGINT, as in shells
_COMMANDS = {
    "serve": ("cluster.serve_command", "serve a model until Ctrl-C"),
    "tree": ("cluster.tree_command", "show what live workers cache"),
    "cache": ("cluster.cache_command", "show and clear what each tier caches"),
    "forget": ("cluster.forget_command", "forget what a tenant has cached"),
    "top": ("cluster.top", "watch the fleet"),
    "trace": ("cluster.trace_command", "show where a request's time went"),
    "replay": ("cluster.replay", "replay a trace in virtual time"),
    "roles": ("cluster.roles_command", "show and set who prefills and decodes"),
    "doctor": ("cluster.doctor.command", "check the nodes for a configuration"),
    "bench": ("cluster.bench_command", "load a server and time its answers"),
    "chat": ("cluster.chat_command", "talk to a server's model"),
    "config": ("cluster.config_command", "what a configuration may contain"),
}
"""Module and summary of each command. A module has HELP and add_arguments. Only that of the given command is
loaded: some of them load Ray, which takes seconds."""


def main(argv: Sequence[str] | None = None) -> int:
    """The program. Returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    arguments = parser_for(words).parse_args(words)
    with exit_on_config_error("baton"):
        try:
            return int(arguments.run(arguments))
        except KeyboardInterrupt:  # before the signal handlers were installed; everything has been ended
            return INTERRUPTED_EXIT


def parser_for(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of a command line, with the arguments of the command that is in it."""
    given = next((word for word in words if not word.startswith("-")), None)
    parser = ExactParser(
        prog="baton", description="Serve a language model with prefill and decode on separate workers."
    )
    parser.add_argument("--version", action="version", version=f"baton {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary)
        if name == given:
            loaded = import_module(module)
            command.description = loaded.HELP
            loaded.add_arguments(command)
    return parser


def _version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:  # a checkout that was never installed
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.exit(main())
