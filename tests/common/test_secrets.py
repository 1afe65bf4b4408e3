"""The cluster's secret: where it comes from, what is refused, and how it is replaced."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.secrets import SECRET_VARIABLE, members_secret, open_secret
from tests.support.members import OTHER_SECRET, SECRET, write_secret


@pytest.fixture(autouse=True)
def _no_secret_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)


def test_without_a_file_and_a_variable_there_is_none() -> None:
    assert open_secret(None) is None


def test_a_file_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, OTHER_SECRET)
    from_variable, from_file = open_secret(None), open_secret(write_secret(tmp_path))
    assert from_variable is not None
    assert from_variable.accepted == (OTHER_SECRET.encode(),)
    assert from_file is not None
    assert from_file.accepted == (SECRET.encode(),)


@pytest.mark.parametrize(
    ("secret", "says"),
    [
        ("CHANGE_ME", "placeholder"), ("change-me-change-me-change-me-please", "placeholder"),
        ("my-very-long-cluster-password-1234567", "placeholder"), ("s", "128 bits"),
        ("0123456789abcdef", "128 bits"), ("a1" * 40, "128 bits"), ("", "no secret"),
    ],
)  # fmt: skip
def test_a_guessable_secret_is_refused(tmp_path: Path, secret: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        open_secret(write_secret(tmp_path, secret))
    assert caught.value.key == "cluster_secret_file"
    assert len(secret) < 8 or secret not in str(caught.value)


def test_an_empty_variable_is_no_secret_but_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "")
    with pytest.raises(ConfigError, match="128 bits"):
        open_secret(None)


def test_a_file_that_all_users_may_read_is_refused(tmp_path: Path) -> None:
    file = write_secret(tmp_path)
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="every user"):
        open_secret(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        open_secret(tmp_path / "none")


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    secret = open_secret(write_secret(tmp_path))
    assert secret is not None
    secret.refresh(1.0)
    write_secret(tmp_path, OTHER_SECRET, SECRET)
    secret.refresh(1.5)
    assert secret.accepted == (SECRET.encode(),)  # looked at less than a second ago
    secret.refresh(2.5)
    assert secret.accepted == (OTHER_SECRET.encode(), SECRET.encode())


def test_a_changed_file_that_cannot_be_used_changes_nothing(tmp_path: Path) -> None:
    file = write_secret(tmp_path)
    secret = open_secret(file)
    assert secret is not None
    write_secret(tmp_path, "CHANGE_ME")
    secret.refresh(10.0)
    file.unlink()
    secret.refresh(20.0)
    assert secret.accepted == (SECRET.encode(),)
    write_secret(tmp_path, OTHER_SECRET)
    os.utime(file, ns=(1, 1))
    secret.refresh(30.0)
    assert secret.accepted == (OTHER_SECRET.encode(),)


@pytest.mark.parametrize("interface", ["10.0.0.1", "eth0", "auto"])
def test_sockets_off_loopback_need_one(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options may have been checked in another process, whose environment had the secret."""
    assert members_secret(None, "127.0.0.1") is None
    with pytest.raises(ConfigError, match=f"{interface} is open to the network"):
        members_secret(None, interface)
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    secret = members_secret(None, interface)
    assert secret is not None
    assert secret.accepted == (SECRET.encode(),)
