"""Where replicas go: what the configuration says is in the Serve application's deployments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator
from ray.serve._private.build_app import build_app
from ray.serve._private.utils import DEFAULT
from ray.serve.deployment import deployment_to_schema

from cluster.app import application, build
from cluster.config import parse_config
from cluster.node import RACK_LABEL
from cluster.placement import PACK_VARIABLE, NodeChoice, check_placement
from common.errors import ConfigError

DEPLOY = Path(__file__).parents[2] / "deploy"


def deployments(**sections: Any) -> dict[str, Any]:
    """The Serve deployments of a configuration, by name."""
    built = build_app(application(parse_config({"model": "m", **sections})), name="test")
    return {one.name: one for one in built.deployments}


def test_labels_accelerators_and_gpus_are_those_of_the_replicas() -> None:
    made = deployments(
        prefill={"labels": {"baton/role": "prefill"}, "accelerator_type": "H100", "num_gpus": 4},
        decode={"labels": {"baton/role": "in(decode, any)"}, "max_replicas_per_node": 2},
    )
    prefill, decode = (made[role].ray_actor_options for role in ("prefill", "decode"))
    assert prefill["label_selector"] == {"baton/role": "prefill"}
    assert (prefill["accelerator_type"], prefill["num_gpus"]) == ("H100", 4)
    assert decode["label_selector"] == {"baton/role": "in(decode, any)"}
    assert "accelerator_type" not in decode
    limits = {role: deployment_to_schema(made[role]).max_replicas_per_node for role in ("prefill", "decode")}
    assert limits == {"prefill": DEFAULT.VALUE, "decode": 2}
    assert "label_selector" not in made["router"].ray_actor_options


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ({"labels": {"not a key!": "x"}}, "decode.labels"),
        ({"labels": {"rack": "a b"}}, "decode.labels"),
        ({"accelerator_type": ""}, "decode.accelerator_type"),
        ({"max_replicas_per_node": 0}, "decode.max_replicas_per_node"),
        ({"placement_group_bundles": []}, "decode.placement_group_bundles"),
    ],
)
def test_what_ray_would_refuse_is_refused_by_name(section: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"model": "m", "decode": section})
    assert caught.value.key == key


def test_replicas_are_packed_only_by_a_serve_that_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    check_placement(NodeChoice.SPREAD, {})
    check_placement(NodeChoice.SPREAD, {PACK_VARIABLE: "0"})
    check_placement(NodeChoice.PACK, {PACK_VARIABLE: "1"})
    for placement, environment in ((NodeChoice.PACK, {}), (NodeChoice.SPREAD, {PACK_VARIABLE: "1"})):
        with pytest.raises(ConfigError, match=PACK_VARIABLE):
            check_placement(placement, environment)
    monkeypatch.delenv(PACK_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="where Ray is started"):
        build({"model": "m", "placement": "pack"})


def test_serve_knows_the_variable_that_makes_it_pack() -> None:
    from ray.serve._private import constants

    assert hasattr(constants, PACK_VARIABLE)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_replica_that_finds_no_room_starts_a_node_of_its_kind(cloud: str, role: str) -> None:
    config = prepare_config(yaml.safe_load((DEPLOY / f"{cloud}.yaml").read_text()))
    for kind in config["available_node_types"].values():
        kind["min_workers"] = 0
    args = yaml.safe_load((DEPLOY / "gpu-serve.yaml").read_text())["applications"][0]["args"]
    options = deployments(prefill=args["prefill"], decode=args["decode"])[role].ray_actor_options
    labels = [
        (key, LabelSelectorOperator.Value("LABEL_OPERATOR_IN"), [value])
        for key, value in options["label_selector"].items()
    ]
    wanted = ResourceRequestUtil.make(
        {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}, label_selectors=[labels]
    )
    autoscaling = AutoscalingConfig(config, skip_content_hash=True)
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs=autoscaling.get_node_type_configs(),
        max_num_nodes=autoscaling.get_max_num_nodes(),
        resource_requests=ResourceRequestUtil.group_by_count([wanted]),
    )
    launches = ResourceDemandScheduler(None).schedule(request).to_launch
    assert {launch.instance_type: launch.count for launch in launches} == {role: 1}


def test_the_rack_label_is_one_that_ray_takes() -> None:
    parse_config({"model": "m", "decode": {"labels": {RACK_LABEL: "r1"}}})
