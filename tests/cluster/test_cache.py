"""`baton cache`: the table of tiers, and clearing them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console

from cluster.cache_table import cache_table, tier_rows
from cluster.cli import main
from kvcache.tenancy.report import SharingReport
from tests.router.directory.test_directory import record
from tests.support.fake_worker import group_layout
from wire.records import GroupPages, MovedPages, Role, WorkerFigures, WorkerRecord

PAGE_BYTES = group_layout().page_bytes


def workers() -> list[WorkerRecord]:
    """One with all tiers, one with a device alone."""
    figures = WorkerFigures(
        groups={"full": GroupPages(100, 20, 60, 5)},
        host={"full": GroupPages(400, 100, 300, 0)},
        moves={
            "to_host": MovedPages(310, 3_000_000_000, 1, 2),
            "to_device": MovedPages(5, 400_000_000, 0, 1),
            "to_peer": MovedPages(2, 100_000_000, 0, 0),
            "to_storage": MovedPages(300, 2_000_000_000, 4, 7),
            "from_storage": MovedPages(2, 100_000_000, 5, 1),
        },
        storage_bytes=12_000_000_000,
        prompt_tokens=800,
        cached_tokens=400,
        cached_from={"device": 200, "host": 80, "storage": 80, "peer": 40},
        fetches={"done": 3, "late": 2, "skipped_short": 9},
        fetched_bytes=700_000_000,
        lent_bytes=900_000_000,
    )
    full = record("d1", role=Role.DECODE, figures=figures)
    alone = WorkerFigures(groups={"full": GroupPages(10, 10, 0, 0)})
    return [full, record("p1", figures=alone)]


PUBLIC = {"nodes": 2, "tokens": 1200, "hit_cur": 7, "u_cnt_l": 4, "hit_pre": 9, "u_pre": 5}
SHARING = SharingReport(visibilities={"public": PUBLIC})


class Router(BaseHTTPRequestHandler):
    asked: ClassVar[list[str]] = []
    answer: ClassVar[object] = {}
    share: ClassVar[bool] = False

    def do_GET(self) -> None:
        if self.path.startswith("/debug/inspect"):
            self.asked.append(f"GET {self.path}")
            self._say(asdict(SHARING))
            return
        found = [msgspec.structs.replace(one, shares_pages=self.share) for one in workers()]
        self._say({"workers": [msgspec.to_builtins(one) for one in found]})

    def do_POST(self) -> None:
        self.asked.append(f"POST {self.path}")
        self._say(self.answer)

    def _say(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def router() -> Iterator[str]:
    Router.asked, Router.share = [], False
    server = HTTPServer(("127.0.0.1", 0), Router)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_tier_of_each_worker_has_a_row() -> None:
    rows = tier_rows(workers())
    assert [(row.worker, row.tier) for row in rows] == [
        ("p1", "device"), ("d1", "device"), ("d1", "host"), ("d1", "storage"), ("d1", "peer"),
    ]  # fmt: skip
    empty, device, host, storage, peer = rows
    assert (empty.pages, empty.total_pages, empty.bytes, empty.prompt_share) == (0, 10, 0, None)
    assert (device.pages, device.total_pages, device.bytes) == (80, 100, 80 * PAGE_BYTES)
    assert [row.prompt_share for row in rows[1:]] == [200 / 800, 80 / 800, 80 / 800, 40 / 800]
    assert (host.pages, host.total_pages, host.failed, host.queued) == (300, 400, 1, 3)
    assert (host.written_bytes, host.read_bytes) == (3_000_000_000, 500_000_000)
    assert (storage.pages, storage.bytes, storage.failed, storage.queued) == (None, 12_000_000_000, 9, 8)
    assert (peer.read_bytes, peer.written_bytes, peer.failed) == (700_000_000, 900_000_000, 2)
    out = StringIO()
    Console(file=out, width=140).print(cache_table(rows))
    lines = [line.split() for line in out.getvalue().splitlines()]
    assert lines[3][:4] == ["d1", "host", "300/400", "75%"]
    assert lines[4] == ["d1", "storage", "-", "-", "12", "10.0%", "2", "0.1", "9", "8"]


def test_one_tier_of_one_worker_as_json(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--url", router, "--worker", "d1", "--tier", "host", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["worker"], row["tier"], row["queued"]) == ("d1", "host", 3)
    with pytest.raises(SystemExit) as ended:
        main(["cache", "--url", router, "--worker", "nobody"])
    assert ended.value.code == 2
    assert "there are: d1, p1" in capsys.readouterr().err


def test_what_is_public_is_shown_where_tenants_share(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--url", router]) == 0
    assert "public" not in capsys.readouterr().out
    Router.share = True
    assert main(["cache", "--url", router, "--worker", "d1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[-2:] == [
        ["worker", "visibility", *PUBLIC],
        ["d1", "public", "2", "1,200", "7", "4", "9", "5"],
    ]
    assert Router.asked == ["GET /debug/inspect?worker=d1&what=sharing"]


def test_clearing_says_what_each_worker_freed_and_who_is_silent(
    router: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Router.answer = {"freed": {"d1": {"device": 1200, "storage": 7}}, "problems": {}, "silent": []}
    assert main(["cache", "clear", "--url", router, "--worker", "d1"]) == 0
    assert capsys.readouterr().out == "d1: device 1,200 pages, storage 7 blobs\n"
    Router.answer = {"freed": {"d1": {}}, "problems": {"d1": "storage: broken"}, "silent": ["p1"]}
    assert main(["cache", "clear", "--url", router, "--tier", "storage"]) == 1
    told = capsys.readouterr()
    assert told.out == "d1: it has no such tier\n"
    assert told.err == "baton: d1: storage: broken\nbaton: p1 did not answer in time\n"
    assert Router.asked == [
        "POST /admin/cache/clear?tier=all&worker=d1", "POST /admin/cache/clear?tier=storage",
    ]  # fmt: skip
