"""README: every command of its cluster section is run, with other addresses and another user only."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from cluster.placeholders import PLACEHOLDERS
from tests.cluster_hosts.readme import DRAIN, JOIN, ROOT, read_commands, replaced

README = (ROOT / "README.md").read_text()
CLUSTER = (ROOT / "deploy" / "cluster.yaml").read_text()
WORDS = {
    "HEAD_ADDRESS": "10.0.0.1",
    "WORKER_ADDRESS_1, WORKER_ADDRESS_2": "10.0.0.2",
    "WORKER_ADDRESS_1": "10.0.0.2",
    "REDIS_ADDRESS": "10.0.0.9",
    "ubuntu": "root",
}


def test_every_command_of_the_section_is_run() -> None:
    commands = read_commands(README)
    assert "serve deploy deploy/cluster-serve.yaml" in commands.deploy
    assert "#" not in commands.up, "the comment is not a part of it"


def test_a_command_that_nothing_runs_is_refused() -> None:
    with pytest.raises(ValueError, match="kubectl"):
        read_commands(README.replace("ray up -y deploy/cluster.yaml", "kubectl apply -f deploy/kuberay.yaml"))


def test_a_command_that_is_gone_is_refused() -> None:
    line = next(line for line in README.splitlines() if line.startswith("ray down"))
    with pytest.raises(ValueError, match="instead of"):
        read_commands(README.replace(f"{line}\n", ""))


def test_the_files_that_the_commands_name_are_there() -> None:
    for command in vars(read_commands(README)).values():
        for word in command.replace("'", " ").split():
            if word.startswith("deploy/"):
                assert Path(ROOT, word).is_file()


def test_nothing_in_capitals_is_left_in_the_commands() -> None:
    for command in vars(read_commands(README)).values():
        left = shlex.split(replaced(command, WORDS))
        assert not [word for word in PLACEHOLDERS if any(word in part for part in left)]


def test_only_addresses_and_the_user_of_the_cluster_file_are_replaced() -> None:
    ours, shipped = yaml.safe_load(replaced(CLUSTER, WORDS)), yaml.safe_load(CLUSTER)
    assert ours["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2"]}
    assert ours["auth"] == {**shipped["auth"], "ssh_user": "root"}
    start = [line.replace("10.0.0.9", "REDIS_ADDRESS") for line in ours["head_start_ray_commands"]]
    assert start == shipped["head_start_ray_commands"] != ours["head_start_ray_commands"]
    others = ours.keys() - {"provider", "auth", "head_start_ray_commands"}
    assert {key: ours[key] for key in others} == {key: shipped[key] for key in others}


def test_the_commands_that_add_and_drain_a_node_are_those_of_the_operations_page() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert "\n".join(JOIN) in page
    assert f"`{DRAIN}`" in page
