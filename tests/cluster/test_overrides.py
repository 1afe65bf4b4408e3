"""What `deployments` of a Serve config put in the place of what `args` say of workers, by its own rules."""

from __future__ import annotations

from typing import Any

import pytest
from ray.serve._private.application_state import override_deployment_info
from ray.serve._private.build_app import build_app as build_serve_app
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_info import DeploymentInfo
from ray.serve.schema import ServeApplicationSchema

from cluster.app import application
from cluster.config import parse_config
from cluster.overrides import Deployed, Planned
from common.errors import ConfigError

SCALING = {"min_replicas": 1, "max_replicas": 8}


def deployed(args: dict[str, Any], **overrides: Any) -> tuple[Deployed, Planned]:
    """What a decode replica gets, and what it was to have. `overrides` are of its entry in `deployments`."""
    config = parse_config({"model": "m", "decode": args})
    built = build_serve_app(application(config), name="baton").deployments
    (decode,) = (one for one in built if one.name == "decode")
    infos = {"decode": DeploymentInfo(decode._deployment_config, decode._replica_config, 0, "", version="1")}
    entries = [{"name": "decode", **overrides}] if overrides else []
    schema = ServeApplicationSchema(name="baton", import_path="cluster.app:build", deployments=entries)
    info = override_deployment_info(infos, schema)["decode"]
    given = DeploymentConfig.from_proto_bytes(info.deployment_config.to_proto_bytes())
    planned = decode.init_args[2]
    assert isinstance(planned, Planned)
    reserved = info.replica_config.ray_actor_options
    return Deployed("decode", given, reserved["num_cpus"], reserved.get("num_gpus", 0.0)), planned


def test_without_overrides_all_is_as_it_was_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    args = {"num_cpus": 3, "num_gpus": 0.5, "env": {"NCCL_DEBUG": "INFO"}, "autoscaling_config": SCALING}
    given, planned = deployed(args)
    given.check_scaling()
    assert given.unheeded(planned) == []
    assert given.options(planned) == {"threads": 3, "gpu_memory_utilization": pytest.approx(0.45)}
    assert given.drain_s(planned) == 60.0


@pytest.mark.parametrize("args", [{"num_replicas": 4}, {"autoscaling_config": SCALING}])
@pytest.mark.parametrize("scaling", [{"autoscaling_config": SCALING}, {"num_replicas": "auto"}])
def test_workers_are_not_scaled_by_requests_that_serve_counts(
    args: dict[str, Any], scaling: dict[str, Any]
) -> None:
    """Serve would count none, and end all but min_replicas of them."""
    given, planned = deployed(args, **scaling)
    if args.keys() == scaling.keys() or "num_replicas" in args:
        with pytest.raises(ConfigError, match=r"deployments\.decode\.autoscaling_config") as refused:
            given.check_scaling()
        assert given.unheeded(planned)[0] == str(refused.value)
    else:  # auto, with a policy that args give
        given.check_scaling()
        assert given.unheeded(planned) == []


def test_a_policy_that_deployments_name_is_used() -> None:
    policy = {"policy_function": "cluster.autoscaling:LoadPolicy", "policy_kwargs": {"target_load": 0.5}}
    given, planned = deployed({}, autoscaling_config={**SCALING, "policy": policy})
    given.check_scaling()
    assert given.unheeded(planned) == []


def test_a_number_of_replicas_beside_autoscaling_is_told_to_have_no_effect() -> None:
    given, planned = deployed({"autoscaling_config": SCALING}, num_replicas=3)
    given.check_scaling()
    (problem,) = given.unheeded(planned)
    assert problem.startswith("deployments.decode.num_replicas has no effect")
    given, planned = deployed({"num_replicas": 2}, num_replicas=3)
    assert given.unheeded(planned) == []


def test_options_follow_what_is_reserved_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """ray_actor_options take the place of everything that args reserve."""
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    args = {"num_cpus": 1, "env": {"NCCL_DEBUG": "INFO"}}
    given, planned = deployed(args, ray_actor_options={"num_cpus": 8, "num_gpus": 0.5})
    assert given.options(planned) == {"threads": 8, "gpu_memory_utilization": pytest.approx(0.45)}
    (problem,) = given.unheeded(planned)
    assert problem.startswith("deployments.decode.ray_actor_options")
    assert "NCCL_DEBUG" in problem
    said = {**args, "options": {"threads": 2, "gpu_memory_utilization": 0.6}}
    given, planned = deployed(said, ray_actor_options={"num_cpus": 8, "num_gpus": 0.5})
    assert given.options(planned) == {}


def test_a_drain_ends_before_serve_ends_the_replica() -> None:
    given, planned = deployed({"drain_s": 60}, graceful_shutdown_timeout_s=20)
    assert given.drain_s(planned) == pytest.approx(16.0)
    given, planned = deployed({"drain_s": 60}, graceful_shutdown_timeout_s=600)
    assert given.drain_s(planned) == 60.0
