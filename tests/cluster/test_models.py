"""Configurations of several models, and of several versions of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app as build_serve_app

from cluster.app import application
from cluster.config import parse_config
from cluster.config_file import read_config
from cluster.role_keeper import RolePlan
from cluster.router_config import parse_router_config
from cluster.serve_command import share_machine
from common.errors import ConfigError
from router.options import RoutedModel

CANARY: dict[str, Any] = {
    "worker": {"page_size": 16},
    "models": [
        {"model": "/models/a", "served_model_name": "a", "model_version": "v1", "weight": 95,
         "decode": {"num_replicas": 3}},
        {"model": "/models/a2", "served_model_name": "a", "model_version": "v2", "weight": 5,
         "worker": {"page_size": 32}, "prefill": {"num_replicas": 0}},
        {"model": "Org/B", "decode": {"max_surge_percent": 100, "options": {"page_size": 8}},
         "prefill": {"options": {"page_size": 8}}},
    ],
}  # fmt: skip


def test_each_model_has_deployments_of_its_own() -> None:
    config = parse_config(CANARY)
    sections = config.worker_sections()
    assert list(sections) == ["prefill-a-v1", "decode-a-v1", "decode-a-v2", "prefill-B", "decode-B"]
    assert sections["decode-a-v1"].num_replicas == 3
    options = {key: config.worker_options(key) for key in sections}
    told = {key: (one.model, one.model_name, one.model_version) for key, one in options.items()}
    assert told["decode-a-v1"] == ("/models/a", "a", "v1")
    assert told["decode-a-v2"] == ("/models/a2", "a", "v2")
    assert told["prefill-B"] == ("Org/B", "B", "")
    assert [one.page_size for one in options.values()] == [16, 16, 32, 8, 8]


def test_the_router_is_told_the_models_and_the_weights_of_their_versions() -> None:
    config = parse_config(CANARY)
    assert config.router_options().served == (
        RoutedModel(model=Path("/models/a"), served_model_name="a"),
        RoutedModel(model=Path("Org/B"), served_model_name="B"),
    ), "without weights: Serve would restart routers whose arguments change"
    router = next(
        one for one in build_serve_app(application(config), name="baton").deployments if one.name == "router"
    )
    assert router._deployment_config.user_config == {
        "version_weights": {"a": {"v1": 95.0, "v2": 5.0}, "B": {}}
    }


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"version_weights": {"c": {}}}, "user_config.version_weights.c"),
        ({"version_weights": {"a": {"v1": -1}}}, "version_weights.a.v1"),
        ({"weights": {}}, "weights"),
    ],
)
def test_a_routers_user_config_is_checked(given: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_router_config(given, frozenset("ab"))
    assert refused.value.key == key
    assert parse_router_config({"version_weights": {"a": {"v1": 1}}}, frozenset("a")).version_weights == {
        "a": {"v1": 1.0}
    }


def test_one_model_is_the_same_thing() -> None:
    one = parse_config({"model": "/models/a", "decode": {"num_replicas": 2}})
    assert list(one.worker_sections()) == ["prefill", "decode"]
    assert one.router_options().served == (RoutedModel(model=Path("/models/a"), served_model_name="a"),)
    listed = parse_config({"models": [{"model": "/models/a", "decode": {"num_replicas": 2}}]})
    assert listed.router_options() == one.router_options()
    assert listed.worker_options("decode-a") == one.worker_options("decode")


def test_serve_gets_the_deployments_and_surges_where_it_may() -> None:
    built = build_serve_app(application(share_machine(parse_config(CANARY))), name="baton")
    found = {one.name: one._deployment_config for one in built.deployments}
    assert set(found) == {
        "router", "prefill-a-v1", "decode-a-v1", "decode-a-v2", "prefill-B", "decode-B"
    }  # fmt: skip
    assert found["decode-a-v1"].num_replicas == 3
    assert {name: one.max_surge_percent for name, one in found.items() if one.max_surge_percent} == {
        "decode-B": 100
    }


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": "/models/c"}, "model"),
        ({"served_model_name": "c"}, "served_model_name"),
        ({"decode": {"num_replicas": 2}}, "decode"),
        ({"roles": "dynamic"}, "models.0.decode"),
        ({"dynamic": {"num_replicas": 4}}, "dynamic"),
        ({"models": [{"model": "a", "dynamic": {"num_replicas": 4}}]}, "models.0.dynamic"),
        ({"models": []}, "model"),
        ({"models": [{"model": "a"}, {"model": "b", "served_model_name": "a"}]}, "models.1.model_version"),
        (
            {"models": [{"model": "a", "weight": 1}, {"model": "a", "model_version": "b"}]},
            "models.1.weight",
        ),
        ({"models": [{"model": "a", "weight": -1}]}, "models.0.weight"),
        ({"models": [{"model": "a", "prefil": {}}]}, "models.0.prefil"),
        ({"models": [{"model": "a", "prefill": {"options": {"page_size": 4}}}]}, "decode.options.page_size"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_config({**CANARY, **changes})
    assert refused.value.key == key


def test_with_dynamic_roles_each_model_has_a_total_of_its_own() -> None:
    config = parse_config(
        {
            "roles": "dynamic",
            "models": [
                {
                    "model": "/models/a",
                    "model_version": "v1",
                    "dynamic": {"num_replicas": 4, "num_cpus": 0.5},
                },
                {"model": "/models/a2", "served_model_name": "a", "model_version": "v2"},
                {"model": "Org/B", "dynamic": {"ttft_s": 1.0, "drain_s": 30}},
            ],
        }
    )
    assert list(config.worker_sections()) == ["dynamic-a-v1", "dynamic-a-v2", "dynamic-B"]
    assert config.cpus() == pytest.approx(0.2 + 4 * 0.5 + 4 * 0.3)
    assert config.role_plans() == {
        "worker-a-v1": RolePlan(2.0, 0.05, 5.0, 60.0),
        "worker-a-v2": RolePlan(2.0, 0.05, 5.0, 60.0),
        "worker-B": RolePlan(1.0, 0.05, 5.0, 30.0),
    }
    told = config.worker_options("dynamic-a-v2")
    assert (told.model, told.model_name, told.model_version) == ("/models/a2", "a", "v2")
    built = build_serve_app(application(config), name="baton").deployments
    found = {one.name: one._deployment_config.num_replicas for one in built if one.name != "router"}
    assert found == {"worker-a-v1": 4, "worker-a-v2": 2, "worker-B": 2}


def test_models_are_found_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    path = tmp_path / "c.yaml"
    path.write_text("models:\n  - {model: m}\n  - {model: Org/B}\n")
    models = read_config(path)["models"]
    assert [one["model"] for one in models] == [str(tmp_path / "m"), "Org/B"]
