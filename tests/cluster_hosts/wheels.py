"""Wheels: what `make setup` installs on a host. Hosts have no way out, so it is fetched before, from here."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

from tests.cluster_hosts.readme import ROOT

_LOCK = ROOT / "requirements.lock"
_BUILDERS = ("setuptools>=77",)  # torch needs it, and so does the project's own wheel
_DOWNLOAD_S = 1200.0


def wheels(cache: Path) -> Path:
    """A folder with the wheel of every locked requirement, filled by pip if it is not there yet."""
    folder = cache / f"wheels-{hashlib.sha256(_LOCK.read_bytes()).hexdigest()[:12]}"
    whole = folder / ".whole"
    if not whole.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder)]
        subprocess.run([*command, "-r", str(_LOCK), *_BUILDERS], check=True, timeout=_DOWNLOAD_S)
        whole.touch()
    return folder


def use_wheels(home: Path, folder: Path) -> None:
    """pip of a host takes packages from that folder, and from nowhere else."""
    configuration = home / ".config" / "pip" / "pip.conf"
    configuration.parent.mkdir(parents=True, exist_ok=True)
    configuration.write_text(f"[global]\nno-index = true\nfind-links = {folder}\n")
