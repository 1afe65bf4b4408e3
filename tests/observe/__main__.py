"""What an operator sees of a running Baton: metrics, traces and the page, each by a program of its own.

python -m tests.observe [--folder FOLDER] [--picture FILE]

A router, one prefill and two decode workers serve the demo model to clients that stream. Debian's Prometheus
scrapes the router: every query of the shipped dashboard, and some with vLLM's names, must return data. A
collector of OpenTelemetry's spans must get a trace with all stages. Debian's Chromium opens the page of the
admin listener (browser.py; its environment is in FOLDER). The last line is "observe ok: N queries, trace ID,
1 page".

Packages of Debian: prometheus, chromium.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx

from tests.clients.environments import ROOT
from tests.harness.local_stack import Stack, stack
from tests.observe.browser import check_dashboard
from tests.observe.prometheus import Prometheus
from tests.support.otlp_collector import OtlpCollector
from tools.grafana_dashboard import queries

_LOAD = 4  # clients
_BOUND_S = 60.0
_VLLM = (
    'sum by(le) (rate(vllm:time_to_first_token_seconds_bucket{model_name="m"}[10s]))',
    'rate(vllm:generation_tokens_total{model_name="m"}[10s])',
    'vllm:num_requests_running{model_name="m"}',
    'vllm:gpu_cache_usage_perc{model_name="m"}',
    'sum by(finished_reason) (increase(vllm:request_success_total{model_name="m"}[10s]))',
    'rate(vllm:request_queue_time_seconds_sum{model_name="m"}[10s])',
)
_STAGES = frozenset(
    {
        "POST /v1/completions", "router", "prefill", "decode", "tokenize", "prefill_forward",
        "prefill_transfer_kv_cache", "decode_bootstrap", "decode_loop",
    }
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when all was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="of environments")
    parser.add_argument("--picture", type=Path, help="PNG of the page to write")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was started is ended then, too
    for program in ("prometheus", "chromium"):
        if shutil.which(program) is None:
            sys.stderr.write(f"observe: {program} is not here: apt-get install {program}\n")
            return 1
    with (
        closing(OtlpCollector()) as collector,
        tempfile.TemporaryDirectory(prefix="baton-observe-") as folder,
    ):
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector.url
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"
        here = Path(folder)
        router = {"metrics_compat": "vllm", "cors_origins": ["*"]}
        with (
            stack(ROOT / "deploy" / "demo_model", here / "stack", 1, 2, router) as running,
            Prometheus(running.router.ready["admin"], here / "prometheus") as prometheus,
            _load(running),
        ):
            asked = _all_have_data(prometheus)
            trace = _wait(lambda: _whole_trace(collector), "no trace has all stages")
            wrong = check_dashboard(
                running.router.ready["admin"], running.url, options.folder, options.picture
            )
            assert not wrong, wrong
    sys.stdout.write(f"observe ok: {asked} queries, trace {trace}, 1 page\n")
    return 0


@contextmanager
def _load(running: Stack) -> Iterator[None]:
    """Clients that stream, and now and then one that asks for a model that is not there."""
    over = threading.Event()

    def ask() -> None:
        number = random.randrange(1 << 30)  # prompts that D has already are not moved to it
        with httpx.Client(base_url=running.url, timeout=60.0) as client:
            while not over.is_set():
                number += 1
                body = {"prompt": f"{number} " * 20, "max_tokens": 24, "ignore_eos": True}
                client.post("/v1/completions", json={**body, "stream": True}).raise_for_status()
                client.post("/v1/completions", json={**body, "model": "none"})

    clients = [threading.Thread(target=ask) for _ in range(_LOAD)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        over.set()
        for client in clients:
            client.join()


def _all_have_data(prometheus: Prometheus) -> int:
    """Wait until every query has returned data. Returns how many there are."""
    asked = [one.replace("$__rate_interval", "10s").replace("$model", ".*") for one in _queries()]
    left = set(asked) | set(_VLLM)
    total, deadline = len(left), time.monotonic() + _BOUND_S
    while left:
        left -= {query for query in left if prometheus.has_data(query)}
        if left and time.monotonic() > deadline:
            raise AssertionError("no data for:\n" + "\n".join(sorted(left)))
        time.sleep(0.5)
    return total


def _queries() -> list[str]:
    return [query for panel in queries().values() for query in panel]


def _whole_trace(collector: OtlpCollector) -> str | None:
    """A trace that has all stages, by its id."""
    names: dict[str, set[str]] = {}
    for span in list(collector.spans):
        names.setdefault(span.trace_id.hex(), set()).add(span.name)
    return next((trace for trace, found in names.items() if found >= _STAGES), None)


def _wait(ask: Callable[[], str | None], failure: str) -> str:
    deadline = time.monotonic() + _BOUND_S
    while (found := ask()) is None:
        assert time.monotonic() < deadline, failure
        time.sleep(0.2)
    return found


if __name__ == "__main__":
    sys.exit(main())
