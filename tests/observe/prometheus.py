"""Debian's Prometheus as a child process, which scrapes one router."""

from __future__ import annotations

import json
import math
import subprocess
import time
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import httpx

from tools.demo import free_port

_CONFIG = {"scrape_interval": "1s", "scrape_timeout": "1s"}
_READY_S, _END_S = 30.0, 20.0


class Prometheus:
    """Ended by its handle."""

    def __init__(self, admin_url: str, directory: Path) -> None:
        directory.mkdir()
        config = directory / "prometheus.json"  # JSON is YAML
        targets = [{"targets": [urlsplit(admin_url).netloc]}]
        jobs = [{"job_name": "baton", "static_configs": targets}]
        config.write_text(json.dumps({"global": _CONFIG, "scrape_configs": jobs}))
        address = f"127.0.0.1:{free_port()}"
        storage = [f"--storage.tsdb.path={directory / 'data'}", f"--web.listen-address={address}"]
        self._log = (directory / "log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={config}", *storage], stdout=self._log, stderr=self._log
        )
        self._http = httpx.Client(base_url=f"http://{address}", timeout=10.0)

    def __enter__(self) -> Self:
        deadline = time.monotonic() + _READY_S
        while True:
            try:
                if self._http.get("/-/ready").status_code == 200:
                    return self
            except httpx.TransportError:
                pass
            assert self._process.poll() is None, "Prometheus has ended"
            assert time.monotonic() < deadline, "Prometheus is not ready"
            time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(_END_S)
        self._log.close()

    def has_data(self, query: str) -> bool:
        """Whether a query returns a finite value now. Raises httpx.HTTPStatusError for one that is wrong."""
        answer = self._http.get("/api/v1/query", params={"query": query}).raise_for_status().json()
        return any(math.isfinite(float(one["value"][1])) for one in answer["data"]["result"])
