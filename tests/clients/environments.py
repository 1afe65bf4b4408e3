"""An environment for each client: a virtual environment, or a folder of npm's. They are kept, and made again
when the client's requirements change."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.clients.catalogue import Client

ROOT = Path(__file__).resolve().parents[2]
_INSTALL_S = 1200.0


class NotInstalled(Exception):
    """An environment could not be made; the message says why."""


def environment(client: Client, folder: Path) -> Path:
    """The client's environment under `folder`, made if it is not there. Raises NotInstalled."""
    digest = hashlib.sha256(
        repr((client.packages, client.unwanted, sys.version_info[:2])).encode()
    ).hexdigest()[:12]
    place = folder / f"{Path(client.script).stem.strip('_')}-{digest}"
    whole = place / "whole"
    if not whole.exists():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if client.is_javascript:
            _install_npm(client, place)
        else:
            _install_pip(client, place)
        whole.touch()
    return place


def command(client: Client, place: Path) -> list[str]:
    """What runs the client's script in its environment. Modules of JavaScript are looked for beside it."""
    scripts = Path(__file__).parent / "scripts"
    if client.is_javascript:
        for path in scripts.glob("*.mjs"):
            shutil.copy(path, place)
        return ["node", str(place / client.script)]
    return [str(place / "bin/python"), str(scripts / client.script)]


def _install_npm(client: Client, place: Path) -> None:
    if shutil.which("npm") is None or shutil.which("node") is None:
        raise NotInstalled("node and npm are not installed: apt-get install nodejs npm")
    (place / "package.json").write_text('{"private": true, "type": "module"}\n')
    _run("npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages, cwd=place)


def _install_pip(client: Client, place: Path) -> None:
    _run(sys.executable, "-m", "venv", str(place), cwd=ROOT)
    pip = (str(place / "bin/pip"), "install", "--quiet", "--disable-pip-version-check")
    if client.needs_torch:  # first, and the build for CPUs: as tools/setup.sh
        lines = (ROOT / "requirements.lock").read_text().splitlines()
        torch = next(line for line in lines if line.startswith("torch=="))
        index = os.environ.get("TORCH_INDEX")
        from_index = ("--retries", "0", "--timeout", "15", "--index-url", index or "", torch)
        if not index or not _succeeds(*pip, *from_index):
            _run(*pip, torch, cwd=ROOT)
    _run(*pip, *client.packages, cwd=ROOT)
    if client.unwanted:
        _run(str(place / "bin/pip"), "uninstall", "--quiet", "--yes", *client.unwanted, cwd=ROOT)


def _succeeds(*words: str) -> bool:
    try:
        _run(*words, cwd=ROOT)
    except NotInstalled:
        return False
    return True


def _run(*words: str, cwd: Path) -> None:
    try:
        done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=_INSTALL_S)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"{words[0]} has not ended within {_INSTALL_S:.0f} s") from None
    if done.returncode:
        raise NotInstalled(f"{' '.join(words)}: {done.stderr[-2000:]}")
