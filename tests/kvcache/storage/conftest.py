"""Servers that backends need, one per test run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kvcache.storage.support import MooncakeMaster, S3Server


@pytest.fixture(scope="session")
def mooncake_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeMaster]:
    """A mooncake_master, or a skip."""
    why = MooncakeMaster.why_not()
    if why:
        pytest.skip(why)
    log: Path = tmp_path_factory.mktemp("mooncake") / "master.log"
    with closing(MooncakeMaster(log)) as master:
        yield master


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto's server, or a skip."""
    for package in ("boto3", "moto", "flask", "flask_cors"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "test")
        with closing(S3Server(tmp_path_factory.mktemp("s3") / "server.log")) as server:
            yield server
