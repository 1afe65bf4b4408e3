"""ServeConfig: what is accepted, what is refused, and how the refusal reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.build_app import build_app as build_serve_app
from ray.serve.config import AutoscalingConfig

from cluster.app import _worker_settings, application
from cluster.config import ServeConfig, parse_config
from cluster.config_file import kept_for_serve, read_config
from cluster.role_keeper import RolePlan
from cluster.router_replica import check_keys
from common.errors import ConfigError
from kvcache.shares.config import SharesConfig, TenantShare
from router.keys import API_KEYS_ENV
from wire.records import Role

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize(
    ("change", "key", "says"),
    [
        ({"modle": "x"}, "modle", "unknown key"),
        ({"worker": {"page_siz": 16}}, "worker.page_siz", "use one of: .*page_size"),
        ({"worker": {"page_size": 12}}, "worker.page_size", "not a power of two"),
        ({"decode": {"options": {"page_size": 32}}}, "decode.options.page_size", "their pages differ"),
        ({"prefill": {"options": {"dtype": "float32"}}}, "decode.options.dtype", "their pages differ"),
        (
            {"decode": {"options": {"kv_cache_dtype": "fp8_e4m3"}}},
            "decode.options.kv_cache_dtype",
            "their pages differ",
        ),
        (
            {"worker": {"max_context_tokens": 4096, "max_total_tokens": 1024}},
            "prefill.options.max_context_tokens",
            "does not fit a pool of 1024",
        ),
        (
            {"worker": {"tp_size": 4}, "decode": {"num_gpus": 2}},
            "decode.num_gpus",
            "it is 2, and the model is computed by 4 ranks",
        ),
        ({"decode": {"num_replicas": 0}}, "decode.num_replicas", "greater than or equal to 1"),
        ({"decode": {"autoscaling_config": {"max": 3}}}, "decode.autoscaling_config.max", "unknown key"),
        (
            {"prefill": {"autoscaling_config": {"min_replicas": 3, "max_replicas": 2}}},
            "prefill.autoscaling_config",
            "does not hold",
        ),
        (
            {"prefill": {"num_replicas": 0, "autoscaling_config": {"max_replicas": 2}}},
            "prefill",
            "num_replicas has no effect with autoscaling_config",
        ),
        (
            {"router": {"num_replicas": 2, "autoscaling_config": {}}},
            "router",
            "num_replicas has no effect with autoscaling_config",
        ),
        ({"roles": "dynamic", "dynamic": {"num_replicas": 1}}, "dynamic.num_replicas", "equal to 2"),
        ({"roles": "dynamic", "decode": {}}, "decode", "no effect with roles: dynamic"),
        ({"dynamic": {"num_replicas": 4}}, "dynamic", "no effect with roles: fixed"),
        (
            {"roles": "dynamic", "dynamic": {"autoscaling_config": {"objective_s": 1}}},
            "dynamic.autoscaling_config",
            "ttft_s and itl_s are the objectives",
        ),
        (
            {"roles": "dynamic", "dynamic": {"autoscaling_config": {"min_replicas": 1}}},
            "dynamic.autoscaling_config.min_replicas",
            "equal to 2",
        ),
        ({"router": {"options": {"polici": "kv"}}}, "router.options.polici", "unknown key"),
        ({"served_model_name": " "}, "served_model_name", "empty name"),
        ({"tenants": {"a": {"min_share": 0.7}, "b": {"min_share": 0.4}}}, "tenants", "1.1 together"),
        ({"tenants": {"a": {"min_share": 0.7, "max_share": 0.2}}}, "tenants.a", "above max_share"),
        ({"tenants": {"a": {"share": 0.7}}}, "tenants.a.share", "unknown key"),
        ({"worker": {"tenants": {"a": {"min_share": 2}}}}, "worker.tenants.a.min_share", "less than"),
        ({"interface": "HEAD_ADDRESS"}, "interface", "HEAD_ADDRESS is a placeholder"),
        (
            {"decode": {"env": {"REDIS": "REDIS_ADDRESS"}}},
            "decode.env.REDIS",
            "REDIS_ADDRESS is a placeholder",
        ),
    ],
)
def test_refusals_name_the_key(change: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        parse_config({"model": "m", **change})
    assert caught.value.key == key
    assert caught.value.remedy


def test_worker_options_are_shared_then_overridden() -> None:
    config = parse_config(
        {
            "model": "models/tiny",
            "cluster_secret_file": "/etc/baton/cluster_secret",
            "worker": {"max_total_tokens": 1024, "max_running_requests": 4, "threads": None},
            "decode": {"num_cpus": 2.5, "options": {"max_running_requests": 8}},
        }
    )
    prefill = config.worker_options(Role.PREFILL)
    decode = config.worker_options(Role.DECODE)
    assert (prefill.max_running_requests, decode.max_running_requests) == (4, 8)
    assert prefill.max_total_tokens == decode.max_total_tokens == 1024
    assert (prefill.threads, decode.threads) == (1, 2)  # what the replica reserves
    assert prefill.served_model_name == decode.served_model_name == "tiny"
    assert prefill.cluster_secret_file == Path("/etc/baton/cluster_secret")


def test_tenants_are_named_once_for_the_router_and_all_workers() -> None:
    config = parse_config(
        {
            "model": "m",
            "tenants": {"a": {"weight": 3, "min_share": 0.25}, "b": {"max_share": 0.5}},
            "worker": {"tenant_defaults": {"max_share": 0.75}},
            "decode": {"options": {"tenants": {"a": {"min_share": 0.5}}}},
            "router": {"options": {"tenant_weights": {"b": 2}}},
        }
    )
    assert config.router_options().tenant_weights == {"a": 3, "b": 2}
    prefill = config.worker_options(Role.PREFILL).shares()
    assert prefill == SharesConfig(
        {"a": TenantShare(0.25), "b": TenantShare(0, 0.5)}, TenantShare(max_share=0.75)
    )
    assert config.worker_options(Role.DECODE).shares().named == {"a": TenantShare(0.5)}
    assert not parse_config({"model": "m"}).worker_options(Role.DECODE).shares().enabled


def test_a_fraction_of_a_gpu_is_that_fraction_of_its_memory() -> None:
    raw = {"model": "m", "prefill": {"num_gpus": 0.5}, "decode": {"num_gpus": 1}}
    config = parse_config(raw)
    shares = [config.worker_options(role).gpu_memory_utilization for role in (Role.PREFILL, Role.DECODE)]
    assert shares == [0.45, 0.9]
    given = parse_config({**raw, "worker": {"gpu_memory_utilization": 0.6}})
    assert given.worker_options(Role.PREFILL).gpu_memory_utilization == 0.6


def test_colocated_needs_no_agreement_and_counts_no_prefill_cpus() -> None:
    config = parse_config(
        {"model": "m", "prefill": {"num_replicas": 0, "options": {"page_size": 1}}, "decode": {"num_cpus": 1}}
    )
    assert list(config.worker_sections()) == ["decode"]
    assert config.cpus() == pytest.approx(1.2)


def test_dynamic_roles_are_one_deployment_with_one_count() -> None:
    config = parse_config(
        {"model": "m", "roles": "dynamic", "dynamic": {"num_replicas": 4, "drain_s": 40, "itl_s": 0.1}}
    )
    assert list(config.worker_sections()) == ["dynamic"]
    assert config.cpus() == pytest.approx(0.2 + 4 * 0.3)
    assert config.shutdown_s() == pytest.approx(max(40, config.router.drain_s) / 0.8 + 15)
    assert config.role_plans() == {"worker": RolePlan(2.0, 0.1, 5.0, 40)}
    settings = _worker_settings(config.dynamic, "dynamic")
    assert settings["num_replicas"] == 4
    assert "autoscaling_config" not in settings
    assert parse_config({"model": "m"}).role_plans() == {}


def test_the_total_of_dynamic_roles_is_scaled_on_both_objectives() -> None:
    scaling = {"max_replicas": 6, "start_s": 30, "downscale_delay_s": 90}
    config = parse_config(
        {"model": "m", "roles": "dynamic", "dynamic": {"itl_s": 0.1, "autoscaling_config": scaling}}
    )
    assert config.cpus() == pytest.approx(0.2 + 6 * 0.3)
    settings = _worker_settings(config.dynamic, "dynamic")
    assert "num_replicas" not in settings
    built = build_serve_app(application(config), name="baton").deployments
    (total,) = (one._deployment_config.autoscaling_config for one in built if one.name == "worker")
    assert (total.min_replicas, total.max_replicas) == (2, 6)
    found = settings["autoscaling_config"]
    assert (found["min_replicas"], found["max_replicas"]) == (2, 6)
    assert (found["upscale_delay_s"], found["downscale_delay_s"]) == (0.0, 0.0)
    told = found["policy"]["policy_kwargs"]
    assert told == {"ttft_s": 2.0, "itl_s": 0.1, "start_s": 30, "hold_s": 90, "period_s": 10.0}


@pytest.mark.parametrize("given", [False, True])
def test_a_router_without_the_keys_that_were_meant_is_refused(
    given: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ray does not pass the environment on in which the application was built."""
    monkeypatch.delenv(API_KEYS_ENV, raising=False)
    if given:
        monkeypatch.setenv(API_KEYS_ENV, "sk-0123456789abcdef")
    config = parse_config({"model": "m"})
    built = build_serve_app(application(config), name="baton").deployments
    (router,) = (one for one in built if one.name == "router")
    assert router.init_kwargs == {"keys_given": given}
    monkeypatch.setenv(API_KEYS_ENV, "sk-0123456789abcdef")
    check_keys(config.router_options())
    monkeypatch.delenv(API_KEYS_ENV)
    with pytest.raises(ConfigError, match=API_KEYS_ENV):
        check_keys(config.router_options())
    check_keys(config.router_options().model_copy(update={"api_keys_file": tmp_path / "keys"}))


def test_cpus_count_what_autoscaling_may_reach() -> None:
    config = parse_config({"model": "m", "decode": {"autoscaling_config": {"max_replicas": 5}}})
    assert config.cpus() == pytest.approx(0.2 + 0.3 + 5 * 0.3)


def test_drain_bound_is_below_serves_own() -> None:
    config = parse_config({"model": "m", "decode": {"drain_s": 40}})
    assert 0.8 * config.decode.graceful_shutdown_timeout_s == pytest.approx(40)


@pytest.mark.parametrize("name", ["demo.yaml", "local.yaml", "cluster-serve.yaml", "gpu-serve.yaml"])
def test_the_configurations_in_deploy_are_valid(name: str) -> None:
    assert parse_config(read_config(DEPLOY / name)).model


def test_a_model_may_be_named_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    path = tmp_path / "config.yaml"
    path.write_text("model: m")
    assert read_config(path)["model"] == str(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    assert read_config(path)["model"] == "m"  # relative to the current directory


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not YAML"),
        ("- 1", "not a mapping"),
        ("applications: []", "not a mapping"),
        ("applications: [x]", "not a mapping"),
        ("applications: [{args: null}]", "not a mapping"),
        (None, "No such file"),
    ],
)
def test_unreadable_files_are_named(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_config(path)


def test_what_a_serve_config_says_to_serve_is_told(tmp_path: Path) -> None:
    """`baton serve` takes `args` alone."""
    path = tmp_path / "config.yaml"
    path.write_text(
        "http_options: {port: 9000}\napplications:\n"
        "- {name: a, import_path: x, args: {model: m}, deployments: [{name: decode, num_replicas: 4}]}\n"
        "- {name: b}\n"
    )
    assert kept_for_serve(path) == ("http_options", "applications[0].deployments", "applications[1]")
    path.write_text("model: m\n")
    assert kept_for_serve(path) == ()


def test_schema_describes_nested_options_in_their_places() -> None:
    schema = ServeConfig.model_json_schema()
    definitions = schema["$defs"]
    assert schema["properties"]["worker"]["$ref"] == "#/$defs/WorkerSettings"
    assert "page_size" in definitions["WorkerSettings"]["properties"]
    assert "directory" not in definitions["WorkerSettings"]["properties"]
    assert definitions["PrefillDeployment"]["additionalProperties"] is False
    for reference in _references(schema):
        assert reference.removeprefix("#/$defs/") in definitions


def _references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if "$ref" in node else []
        return own + [one for value in node.values() for one in _references(value)]
    if isinstance(node, list):
        return [one for value in node for one in _references(value)]
    return []


def test_an_objective_replaces_the_load_and_serves_delays() -> None:
    scaling = {"max_replicas": 4, "objective_s": 2.0, "downscale_delay_s": 90.0}
    config = parse_config({"model": "m", "prefill": {"autoscaling_config": scaling}})
    settings = _worker_settings(config.prefill, Role.PREFILL)["autoscaling_config"]
    assert settings["policy"]["policy_function"].endswith(":ObjectivePolicy")
    assert settings["policy"]["policy_kwargs"] == {
        "ttft_s": 2.0, "itl_s": None, "start_s": 60.0, "hold_s": 90.0, "period_s": 10.0,
    }  # fmt: skip
    assert (settings["upscale_delay_s"], settings["downscale_delay_s"]) == (0.0, 0.0)
    AutoscalingConfig(**settings)  # Serve accepts it


@pytest.mark.parametrize(
    "wrong",
    [{"objective_s": 2.0, "target_load": 0.5}, {"objective_s": 2.0, "upscale_delay_s": 1}, {"start_s": 1}],
)
def test_a_key_without_effect_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{list(wrong)[-1]} has no effect"):
        parse_config({"model": "m", "decode": {"autoscaling_config": wrong}})
