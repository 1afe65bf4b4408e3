"""What a worker's log says of the way that its pages take."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtransfer import mooncake_engine
from worker.options import WorkerOptions
from worker.transfer_log import tell_transfer


@pytest.fixture
def no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_engine, "_INFINIBAND", tmp_path)
    mooncake_engine.why_no_rdma.cache_clear()


def options(backend: str) -> WorkerOptions:
    return WorkerOptions(model="m", served_model_name="m", kv_transfer_backend=backend)


@pytest.mark.usefixtures("no_device")
def test_on_several_hosts_it_says_why_mooncake_is_not_offered(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tell_transfer(options("auto"), 2)
    assert f"mooncake is not offered: this host has no RDMA device in {tmp_path}" in caplog.text


@pytest.mark.usefixtures("no_device")
@pytest.mark.parametrize(("backend", "hosts"), [("auto", 1), ("tcp", 2), ("mooncake", 2)])
def test_it_says_nothing_where_nobody_asks(
    caplog: pytest.LogCaptureFixture, backend: str, hosts: int
) -> None:
    tell_transfer(options(backend), hosts)
    assert caplog.text == ""
