"""The dashboard's check, in the environment of its own that it needs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.clients.catalogue import Client
from tests.clients.environments import NotInstalled, environment

_PLAYWRIGHT = Client("playwright", "dashboard.py", ("playwright==1.65.2",))
_SECONDS = 180.0
_SHOWN = 4000  # characters: what Playwright expected comes before the page that it found


def check_dashboard(admin: str, api: str, environments: Path, picture: Path | None = None) -> str:
    """What is wrong with the dashboard of the listener at `admin` while the API is used; "" if nothing is.

    Needs Chromium (Debian's package), and two streams or more that are answered all the time.
    """
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        return "Chromium is not installed: apt-get install chromium"
    try:
        place = environment(_PLAYWRIGHT, environments)
    except NotInstalled as error:
        return str(error)
    script = Path(__file__).parent / "scripts" / _PLAYWRIGHT.script
    words = [str(place / "bin/python"), str(script), "--admin", admin, "--api", api, "--chromium", chromium]
    if picture is not None:
        words += ["--picture", str(picture)]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        return f"it has not ended within {_SECONDS:.0f} s"
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[:_SHOWN]
