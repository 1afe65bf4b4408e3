"""The commands of README's cluster section. Addresses and users are replaced in them and in deploy/."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
JOIN = (
    "ray up -y --no-restart deploy/cluster.yaml",
    "ray exec deploy/cluster.yaml 'ray get-worker-ips ~/ray_bootstrap_config.yaml'",
)
"""What docs/operations.md says adds a node, after its address is in the file."""
DRAIN = (
    "ray drain-node --node-id ID --reason DRAIN_NODE_REASON_PREEMPTION --reason-message WHY "
    "--deadline-remaining-seconds 120"
)
"""What it says drains one, on the head."""
_SECTION = "## Go to a cluster"
_KINDS = {
    "token": r"ray get-auth-token --generate$",
    "up": r"ray up -y deploy/cluster\.yaml$",
    "deploy": r"ray exec deploy/cluster\.yaml '.*\bserve deploy deploy/cluster-serve\.yaml'$",
    "ask": r"curl .*http://HEAD_ADDRESS:8000/v1/chat/completions",
    "shutdown": r"ray exec deploy/cluster\.yaml 'serve shutdown -y'$",
    "down": r"ray down -y deploy/cluster\.yaml$",
    "stop": r"ssh ubuntu@WORKER_ADDRESS_1 ",
}


@dataclass(frozen=True)
class Commands:
    """One shell command each, as README has it, in its order."""

    token: str
    up: str
    deploy: str
    ask: str
    shutdown: str
    down: str
    stop: str  # of one worker: the others have other addresses

    def __post_init__(self) -> None:
        assert tuple(_KINDS) == tuple(field.name for field in fields(self))


def read_commands(readme: str) -> Commands:
    """The commands of the section's shell blocks. Raises ValueError for one that is not of a kind that this
    runs, and for a kind that is not there exactly once or in another order."""
    section = readme.partition(f"{_SECTION}\n")[2].partition("\n## ")[0]
    found: dict[str, str] = {}
    for command in _commands_of(section):
        kinds = [kind for kind, pattern in _KINDS.items() if re.match(pattern, command, re.DOTALL)]
        if len(kinds) != 1 or kinds[0] in found:
            raise ValueError(f"README: nothing runs {command!r}, or it is there twice")
        found[kinds[0]] = command
    if list(found) != list(_KINDS):
        raise ValueError(f"README: {list(found)} instead of {list(_KINDS)}")
    return Commands(**found)


def replaced(text: str, words: Mapping[str, str]) -> str:
    """The text with other words, each found only where it stands alone."""
    for word, instead in words.items():
        text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", instead, text)
    return text


def _commands_of(section: str) -> list[str]:
    """Shell commands, without comments; a backslash at the end of a line goes on in the next one."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    lines = textwrap.dedent("".join(blocks)).replace("\\\n", " ").splitlines()
    commands = (re.sub(r"(^|\s{2,})#.*$", "", line).strip() for line in lines)
    return [re.sub(r"\s+", " ", command) for command in commands if command]
