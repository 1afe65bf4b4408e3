"""`baton doctor`: each seeded fault is found, at its node, with its remedy; a sound cluster has none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.config import ServeConfig, parse_config
from cluster.doctor.checks import judge
from cluster.doctor.facts import Case, Finding, Grade, NodeFacts, PortsFree, Problem, Reach, Target

GIB = 1 << 30
VERSIONS = {
    "Python": "3.11.7",
    "Baton": "0.1.0 aaaaaaaa",
    "Ray": "2.60.0",
    "torch": "2.13.0",
    "transformers": "5.23.0",
    "Mooncake": "",
}
NAMES = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
RANGES = {"mailboxes": "20000-20199", "events": "20200-20599", "kv": "20600-20799"}


def config(**changes: Any) -> ServeConfig:
    return parse_config({"model": "/models/m", "worker": {"max_total_tokens": 4096}, **changes})


def sound(node: str) -> NodeFacts:
    return NodeFacts(
        node=node,
        versions=VERSIONS,
        address=node,
        memory=16 * GIB,
        shm=8 * GIB,
        object_store=4 * GIB,
        resources={"CPU": 8.0},
        ports={use: PortsFree(text, 200, 200) for use, text in RANGES.items()},
        secret_digests=("5ec2e7",),
        needs={"prefill": 3 * GIB, "decode": 4 * GIB},
    )


def reach(source: str, target: str, use: str, problem: str = "") -> Reach:
    return Reach(source, Target(target, use, RANGES[use], target, 20_007, b"token"), problem)


def all_reaches() -> list[Reach]:
    return [reach(a, b, use) for a in NAMES for b in NAMES if a != b for use in RANGES]


def findings(changes: dict[str, Any], reaches: list[Reach] | None = None, **settings: Any) -> list[Finding]:
    """What is found when the facts of the second of three sound nodes have these changes."""
    first, second, third = map(sound, NAMES)
    nodes = [first, replace(second, **changes), third]
    return judge(Case(nodes, all_reaches() if reaches is None else reaches, config(**settings)))


def fault(found: list[Finding]) -> Finding:
    """The only fault."""
    (one,) = (finding for finding in found if finding.grade is Grade.FAULT)
    return one


def test_a_sound_cluster_has_no_fault_and_every_check_speaks_of_every_node() -> None:
    found = findings({})
    assert {one.grade for one in found} == {Grade.OK}
    assert all(not one.remedy for one in found)
    for check in ("versions", "clock", "address", "ports", "reachable", "secret", "model", "resources",
                  "memory", "shared memory", "RDMA"):  # fmt: skip
        assert {one.node for one in found if one.check == check} == set(NAMES), check


def test_a_closed_port() -> None:
    """Of one range, by a firewall."""
    late = "no answer within 3 s"
    blocked = [
        one._replace(problem=late) if one.target[:2] == (NAMES[1], "kv") else one for one in all_reaches()
    ]
    one = fault(findings({}, blocked))
    assert (one.check, one.node) == ("reachable", NAMES[1])
    assert one.found == "port 20007 of ports.kv is closed to 10.0.0.1, 10.0.0.3: no answer within 3 s"
    assert "open 20600-20799 between the nodes" in one.remedy


def test_a_range_that_is_taken() -> None:
    one = fault(findings({"ports": {"kv": PortsFree("20600-20799", 0, 200)}}))
    assert (one.check, one.node) == ("ports", NAMES[1])
    assert one.found == "ports.kv 20600-20799: 0 of 200 free"
    assert "give ports.kv another, larger range" in one.remedy


def test_a_range_that_is_too_small() -> None:
    ports = {"events": PortsFree("20200-20209", 10, 10)}
    one = fault(findings({"ports": ports}, decode={"autoscaling_config": {"max_replicas": 6}}))
    assert one.found == "ports.events 20200-20209: 10 of 10 free, 36 may be needed"


def test_an_announced_address_that_is_not_reached() -> None:
    lost = [
        one._replace(problem="no route to host") if one.target.node == NAMES[1] else one
        for one in all_reaches()
    ]
    one = fault(findings({}, lost))
    assert (one.check, one.node) == ("reachable", NAMES[1])
    assert (
        one.found == "the announced address 10.0.0.2 is not reached from 10.0.0.1, 10.0.0.3: no route to host"
    )
    assert "set interface" in one.remedy


def test_an_address_that_only_its_own_host_can_reach() -> None:
    one = fault(findings({"address": "127.0.0.1"}))
    assert (one.check, one.node, one.remedy) == ("address", NAMES[1], "set interface: auto")


@pytest.mark.parametrize(
    ("digests", "says"),
    [(("07e4ea",), "another one than on other nodes"), ((), "none here, and other nodes have one")],
)
def test_a_wrong_secret(digests: tuple[str, ...], says: str) -> None:
    one = fault(findings({"secret_digests": digests}))
    assert (one.check, one.node, one.found) == ("secret", NAMES[1], says)
    assert "same cluster_secret_file on every node" in one.remedy


def test_a_secret_that_is_being_replaced_is_no_fault() -> None:
    """The first step: the new one is a second line on one node, and on no other yet."""
    found = findings({"secret_digests": ("5ec2e7", "4e3e57")})
    assert {one.grade for one in found} == {Grade.OK}


def test_two_nodes_with_different_secrets_are_both_named() -> None:
    """Nobody can say which is wrong."""
    first, second = sound(NAMES[0]), replace(sound(NAMES[1]), secret_digests=("07e4ea",))
    found = judge(Case([first, second], [], config()))
    assert [one.node for one in found if one.grade is Grade.FAULT] == list(NAMES[:2])


@pytest.mark.parametrize(("ahead", "says"), [(90.0, "90.0 s ahead of"), (-90.0, "90.0 s behind")])
def test_a_clock_that_is_90_s_off(ahead: float, says: str) -> None:
    one = fault(findings({"clock_ahead_s": ahead, "clock_error_s": 0.2}))
    assert (one.check, one.node) == ("clock", NAMES[1])
    assert one.found.startswith(says)
    assert "time service" in one.remedy


def test_a_clock_that_could_not_be_read_better_is_not_accused() -> None:
    found = findings({"clock_ahead_s": 5.0, "clock_error_s": 4.5})
    assert {one.grade for one in found} == {Grade.OK}


def test_a_missing_model_file() -> None:
    unusable = {
        "model": Problem("/models/m lacks model.safetensors", "copy the whole checkpoint to this node")
    }
    one = fault(findings({"unusable": unusable, "needs": {}}))
    assert (one.check, one.node) == ("model", NAMES[1])
    assert (one.found, one.remedy) == unusable["model"]


def test_a_model_that_will_be_downloaded_is_a_note() -> None:
    unusable = {"download": Problem("this node has not downloaded m", "wait for it")}
    (one,) = (one for one in findings({"unusable": unusable, "needs": {}}) if one.grade is not Grade.OK)
    assert (one.check, one.grade, one.remedy) == ("model", Grade.NOTE, "wait for it")


def test_too_little_shared_memory_for_rays_store() -> None:
    one = fault(findings({"shm": 64 << 20}))
    assert (one.check, one.node) == ("shared memory", NAMES[1])
    assert one.found == "64 MiB in /dev/shm, 4.0 GiB for Ray's object store"
    assert "--shm-size" in one.remedy


@pytest.mark.parametrize(
    ("name", "version", "remedy"),
    [
        ("Baton", "0.1.0 bbbbbbbb", "copy the same source or image to every node"),
        ("Ray", "2.59.1", "install the same Ray on every node, and start Ray there again"),
        ("torch", "", "install the same torch on every node"),
    ],
)
def test_another_version(name: str, version: str, remedy: str) -> None:
    one = fault(findings({"versions": {**VERSIONS, name: version}}))
    assert (one.check, one.node) == ("versions", NAMES[1])
    assert one.found == f"{name} {version or 'is not installed'} here, {VERSIONS[name]} on other nodes"
    assert remedy in one.remedy


def test_too_little_memory_for_the_pool() -> None:
    one = fault(findings({"needs": {"prefill": 3 * GIB, "decode": 40 * GIB}}))
    assert (one.check, one.node) == ("memory", NAMES[1])
    assert one.found == "decode: weights and KV take 40.0 GiB, 16.0 GiB free"
    assert "lower max_total_tokens" in one.remedy


def test_the_memory_of_a_node_where_no_such_worker_can_run_does_not_count() -> None:
    found = findings({"needs": {"decode": 40 * GIB}, "resources": {"CPU": 0.0}})
    assert {one.grade for one in found} == {Grade.OK}


def test_the_memory_of_a_gpu_counts_for_workers_that_have_one() -> None:
    facts = replace(
        sound("a"), resources={"CPU": 8.0, "GPU": 1.0}, gpu_memory=(8 * GIB,), needs={"decode": 9 * GIB}
    )
    one = fault(judge(Case([facts], [], config(decode={"num_gpus": 1}))))
    assert one.found == "decode: weights and KV take 9.0 GiB, 7.2 GiB of a GPU (its share, 0.9 of 8.0 GiB)"
    assert "raise gpu_memory_utilization" in one.remedy


@pytest.mark.parametrize(
    ("worker", "decode", "share"),
    [
        ({}, {"num_gpus": 1}, 0.9),
        ({}, {"num_gpus": 0.5}, 0.45),
        ({"gpu_memory_utilization": 0.3}, {"num_gpus": 1}, 0.3),
    ],
)
def test_a_worker_has_its_share_of_a_gpu(
    worker: dict[str, Any], decode: dict[str, Any], share: float
) -> None:
    settings = config(worker={"max_total_tokens": 4096, **worker}, decode=decode)
    for need, grade in ((int(share * 8 * GIB) - 1, Grade.OK), (int(share * 8 * GIB) + 1, Grade.FAULT)):
        facts = replace(
            sound("a"), resources={"CPU": 8.0, "GPU": 1.0}, gpu_memory=(8 * GIB,), needs={"decode": need}
        )
        (one,) = (one for one in judge(Case([facts], [], settings)) if one.check == "memory")
        assert one.grade is grade


@pytest.mark.parametrize(("need", "grade"), [(28 * GIB, Grade.OK), (30 * GIB, Grade.FAULT)])
def test_a_worker_of_several_ranks_has_the_memory_of_as_many_gpus(need: int, grade: Grade) -> None:
    settings = config(worker={"tp_size": 4}, decode={"num_gpus": 4})
    resources = {"CPU": 8.0, "GPU": 4.0}
    facts = replace(sound("a"), resources=resources, gpu_memory=(8 * GIB,) * 4, needs={"decode": need})
    (one,) = (one for one in judge(Case([facts], [], settings)) if one.check == "memory")
    assert one.grade is grade
    assert "28.8 GiB of 4 GPUs (its share, 0.9 of 8.0 GiB)" in one.found


UNUSABLE = Problem("torch 2.13.0+cpu is built without CUDA", "install torch for CUDA")


@pytest.mark.parametrize(
    ("worker", "grade"),
    [
        ({}, Grade.FAULT),
        ({"device": "cuda:0"}, Grade.FAULT),
        ({"device": "cpu"}, Grade.NOTE),
        ({"engine": "fake"}, Grade.NOTE),
    ],
)
def test_a_gpu_that_torch_cannot_use(worker: dict[str, Any], grade: Grade) -> None:
    found = findings({"unusable": {"gpu": UNUSABLE}}, worker={"max_total_tokens": 4096, **worker})
    (one,) = (one for one in found if one.grade is not Grade.OK)
    assert one == Finding("GPU", NAMES[1], grade, *UNUSABLE)


def test_a_gpu_of_a_machine_that_torch_cannot_use() -> None:
    facts = replace(sound("a"), unusable={"gpu": UNUSABLE}, gpu_memory=(8 * GIB,))
    assert fault(judge(Case([facts], [], None))).check == "GPU"


def test_a_gpu_that_no_worker_can_be_on_does_not_count() -> None:
    found = findings({"unusable": {"gpu": UNUSABLE}, "resources": {"CPU": 0.0}})
    assert {one.grade for one in found} == {Grade.OK, Grade.NOTE}


def test_gpus_are_asked_for_where_there_are_none() -> None:
    one = fault(findings({}, decode={"num_gpus": 1}))
    assert one.check == "resources"
    assert one.found == "decode asks for GPU 1, and no node has more than 0"
    assert "lower decode.num_gpus" in one.remedy
    with_gpu = findings({"resources": {"CPU": 8.0, "GPU": 1.0}}, decode={"num_gpus": 1})
    assert {one.grade for one in with_gpu} == {Grade.OK}


@pytest.mark.parametrize("wanted", ["prefill", "!decode", "in(prefill, other)", "!in(decode)"])
def test_a_node_with_the_labels_is_found(wanted: str) -> None:
    found = findings({"labels": {"baton/role": "prefill"}}, prefill={"labels": {"baton/role": wanted}})
    assert {one.grade for one in found} == {Grade.OK}


def test_labels_that_no_node_has() -> None:
    nodes = [replace(sound(name), labels={"baton/role": "decode"}) for name in NAMES]
    settings = {"labels": {"baton/role": "prefill"}, "accelerator_type": "H200"}
    one, other = (
        fault(judge(Case(nodes, [], config(prefill={key: value})))) for key, value in settings.items()
    )
    assert "the labels {'baton/role': 'prefill'}" in one.found
    assert "ray start --labels" in one.remedy
    assert other.found == "prefill asks for an accelerator H200, and no node has one"


@pytest.mark.parametrize("asked", [{"accelerator_type": "H200"}, {"resources": {"fast": 1}}])
def test_what_only_ray_knows_is_no_fault_without_it(asked: dict[str, Any]) -> None:
    settings = config(prefill={**asked, "labels": {"baton/role": "prefill"}})
    (alone,) = (one for one in judge(Case([sound("a")], [], settings)) if one.check == "resources")
    assert alone.grade is Grade.OK
    labels = {"baton/role": "prefill"}
    one = fault(judge(Case([replace(sound("a"), labels=labels)], [], settings)))
    assert one.check == "resources"
    has = {"CPU": 8.0, "fast": 1.0, "accelerator_type:H200": 1.0}
    found = judge(Case([replace(sound("a"), labels=labels, resources=has)], [], settings))
    assert {one.grade for one in found} == {Grade.OK}


def test_mooncake_without_rdma_and_without_its_package() -> None:
    backend = {"worker": {"kv_transfer_backend": "mooncake", "max_total_tokens": 4096}}
    found = [one for one in findings({"rdma_devices": ("mlx5_0",)}, **backend) if one.grade is not Grade.OK]
    assert {(one.check, one.node, one.grade) for one in found} == {
        ("versions", NAMES[0], Grade.FAULT), ("versions", NAMES[1], Grade.FAULT),
        ("versions", NAMES[2], Grade.FAULT),
        ("RDMA", NAMES[0], Grade.NOTE), ("RDMA", NAMES[2], Grade.NOTE),
    }  # fmt: skip


def test_rdma_needs_locked_memory() -> None:
    (one,) = (
        one
        for one in findings({"rdma_devices": ("mlx5_0",), "locked_memory": 8 << 20})
        if one.grade is not Grade.OK
    )
    assert (one.check, one.node, one.grade) == ("RDMA", NAMES[1], Grade.NOTE)
    assert "ulimit -l unlimited" in one.remedy
