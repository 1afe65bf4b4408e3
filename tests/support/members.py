"""Cluster secrets for tests, and processes that know them or not."""

from __future__ import annotations

from pathlib import Path

from common.secrets import ClusterSecret
from wire.security import Curve

SECRET = "3f1c9a70b2d84e65a1f0c3d7e8b94a26"
OTHER_SECRET = "c0ffee15bad5eed5a1b2c3d4e5f60718"


def secret_of(text: str | None = SECRET) -> ClusterSecret | None:
    """The secret of a test's cluster; None: it has none."""
    return None if text is None else ClusterSecret((text.encode(),))


def curve_of(text: str | None = SECRET) -> Curve | None:
    """A process of that cluster."""
    secret = secret_of(text)
    return None if secret is None else Curve(secret)


def member(text: str = SECRET) -> Curve:
    """A process of a cluster with that secret."""
    return Curve(ClusterSecret((text.encode(),)))


def write_secret(directory: Path, *lines: str) -> Path:
    """A secret file with these lines, or with SECRET."""
    path = directory / "cluster_secret"
    path.touch(mode=0o600)
    path.write_text("\n".join(lines or (SECRET,)) + "\n")
    return path
