"""`make wheel`: build a wheel, install it in a clean virtual environment, and run what users run from it.

Everything happens in a temporary directory. The wheel is built with `python -m build` from the files that
git knows. It must hold the shipped packages with their C++ sources, and no tests, benches or tools. It is
installed with dependencies as in requirements.lock. Then, outside the checkout: the help of every command,
`baton config`, `baton replay chat:1`, and one chat through `baton serve` with deploy/demo.yaml.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from tests.harness.leftovers import Run
from tools.demo import free_port
from tools.shipped import ROOT, shipped_files

READY_S = 180.0
SOURCES = (".py", ".cpp", ".h", ".typed")


class WheelError(Exception):
    """The wheel is not what it should be; the message says how."""


def main() -> int:
    """Returns the exit code: 0 when everything works."""
    run = Run.begin()
    scratch = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))  # short: Ray puts Unix sockets below it
    try:
        wheel = build_wheel(scratch)
        check_contents(wheel)
        baton = install(wheel, scratch / "clean")
        elsewhere = scratch / "elsewhere"
        elsewhere.mkdir()
        check_commands(baton, elsewhere)
        check_serve(baton, elsewhere, run)
    except WheelError as error:
        print(f"wheel: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(f"wheel ok: {wheel.name}")
    return 0


def build_wheel(scratch: Path) -> Path:
    """A wheel of the files that git knows."""
    source = scratch / "source"
    for name in _git_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target)
    python = _environment(scratch / "build")
    _run([python, "-m", "pip", "install", "-q", "build"], scratch)
    _run([python, "-m", "build", "--wheel", "--outdir", str(scratch / "dist"), str(source)], scratch)
    (wheel,) = (scratch / "dist").glob("*.whl")
    return wheel


def check_contents(wheel: Path) -> None:
    """Every source file of the shipped packages, and nothing else. Raises WheelError."""
    wanted = set(shipped_files(*SOURCES)) & set(_git_files())
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    if found != wanted:
        raise WheelError(f"missing: {sorted(wanted - found)}; too much: {sorted(found - wanted)}")


def install(wheel: Path, directory: Path) -> str:
    """Install the wheel in a new environment; returns the path of its `baton`."""
    python = _environment(directory)
    lock = ROOT / "requirements.lock"
    (torch,) = (line for line in lock.read_text().splitlines() if line.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX", "")
    # torch first: a plain requirement would pull in gigabytes of CUDA wheels on a CPU machine.
    from_index = [*pip, "--retries", "0", "--timeout", "15", "--index-url", index, torch]
    if not index or subprocess.run(from_index, cwd=directory, check=False).returncode:
        _run([*pip, torch], directory)
    _run([*pip, "-c", str(lock), str(wheel)], directory)
    return str(directory / "bin" / "baton")


def check_commands(baton: str, elsewhere: Path) -> None:
    """What needs no server."""
    shown = _run([baton, "--help"], elsewhere)
    for command in ("serve", "tree", "replay", "config"):
        if command not in shown:
            raise WheelError(f"baton --help does not name {command}")
        _run([baton, command, "--help"], elsewhere)
    _run([baton, "--version"], elsewhere)
    json.loads(_run([baton, "config", "--schema"], elsewhere))
    _run([baton, "config", "--check", str(ROOT / "deploy/demo.yaml")], elsewhere)
    runs = json.loads(_run([baton, "replay", "chat:1", "--json"], elsewhere))["runs"]
    if not runs:
        raise WheelError("baton replay chat:1 reports no run")


def check_serve(baton: str, elsewhere: Path, run: Run) -> None:
    """One chat through `baton serve` on a Ray of its own, which Ctrl-C ends."""
    port = free_port()
    command = [baton, "serve", str(ROOT / "deploy/demo.yaml"), "--port", str(port)]
    # A token of its own: Ray would store one in the home directory.
    own = {"RAY_ADDRESS": "local", "RAY_TMPDIR": str(elsewhere), "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    log = elsewhere / "serve.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=elsewhere, env={**_outside(), **own}, stdout=out, stderr=out)
    try:
        answer = _chat(f"http://127.0.0.1:{port}", server)
        run.look()
    except WheelError as error:
        raise WheelError(f"{error}\n{log.read_text()[-4000:]}") from error
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(READY_S)
    if code != 0 or not answer:
        raise WheelError(f"baton serve ended with {code}:\n{log.read_text()[-4000:]}")
    left = run.leftovers(10.0)
    if left:
        raise WheelError("left behind: " + "; ".join(left))


def _chat(url: str, server: subprocess.Popen[bytes]) -> str:
    body = {"model": "demo_model", "messages": [{"role": "user", "content": "What does os.path.join do?"}]}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    deadline = time.monotonic() + READY_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=READY_S) as answer:
                return str(json.load(answer)["choices"][0]["message"]["content"])
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)  # not serving yet
    raise WheelError("baton serve does not answer a chat")


def _git_files() -> list[str]:
    listed = _run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines()
    return [name for name in listed if (ROOT / name).is_file()]


def _environment(directory: Path) -> str:
    """A new virtual environment's interpreter."""
    _run([sys.executable, "-m", "venv", str(directory)], ROOT)
    return str(directory / "bin" / "python")


def _outside() -> dict[str, str]:
    """The environment without PYTHONPATH: imports from the checkout would hide what the wheel lacks."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def _run(command: list[str], directory: Path) -> str:
    """What the command printed. Raises WheelError when it fails."""
    done = subprocess.run(command, cwd=directory, env=_outside(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise WheelError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
