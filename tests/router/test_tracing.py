"""Traces and lines of requests: off unless asked for; one trace with every stage, as a collector gets it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.cli import main
from common.errors import ConfigError
from router.tracing import open_tracing
from tests.router.conftest import ROOT, RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from tests.support.otlp_collector import OtlpCollector
from wire.records import Role

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def collector() -> Iterator[OtlpCollector]:
    made = OtlpCollector()
    yield made
    made.close()


def test_without_the_variables_nothing_of_opentelemetry_is_imported() -> None:
    assert open_tracing({}) is None
    assert open_tracing({"OTEL_TRACES_EXPORTER": "none"}) is None
    assert open_tracing({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}) is None
    imports = re.compile(r"^\s*(?:from|import) (?:opentelemetry|router\.spans)\b", re.MULTILINE)
    sources = [path for room in ("common", "wire", "router") for path in (ROOT / room).rglob("*.py")]
    assert [path.name for path in sources if imports.search(path.read_text())] == ["spans.py"]


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_TRACES_EXPORTER": "zipkin"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
    ],
)
def test_an_exporter_that_is_not_here_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="is not supported"):
        open_tracing(environment)


def told_by_baton_trace(
    router: RouterProcess, request_id: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = ["--url", str(router.admin.base_url)]
    assert main(["trace", request_id, *url]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert [row[2:] for row in rows][:2] == [["router", "tokenize"], ["router", "tokenizer_dispatch"]]
    assert [row[3] for row in rows if row[2].startswith("decode")] == ["decode_bootstrap", "decode_loop"]
    assert main(["trace", request_id, "--perfetto", str(file), *url]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tokens = [event for event in events if event["ph"] == "X" and event["name"].startswith("token ")]
    assert [event["name"] for event in tokens] == ["token 2", "token 3"]
    assert {names[event["pid"]].partition("-")[0] for event in tokens} == {"decode"}
    assert tokens[0]["ts"] + tokens[0]["dur"] == pytest.approx(tokens[1]["ts"])
    with pytest.raises(SystemExit, match="2"):
        main(["trace", "unknown", *url])
    assert "no trace of request 'unknown' is kept" in capsys.readouterr().err


def test_one_trace_has_all_stages(
    collector: OtlpCollector,
    tmp_path: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    log = tmp_path / "requests.jsonl"
    router = start_router(tmp_path, model, request_log=str(log))
    workers = [FakeWorker(role, router.mailbox, step_s=0.001) for role in Role]
    try:
        router.wait_for_workers(2)
        body = {"prompt": "x", "max_tokens": 3}
        unsampled = router.http.post("/v1/completions", json=body)
        assert "traceresponse" not in unsampled.headers
        answer = router.http.post("/v1/completions", json=body, headers={"traceparent": PARENT})
        assert router.http.post("/v1/completions", json={"model": "other", **body}).status_code == 404
        assert router.http.get("/health").status_code == 200
        roots = {"POST /v1/completions", "router", "prefill", "decode"}
        wait_until(lambda: roots <= collector.named().keys())
        told_by_baton_trace(router, answer.headers["x-request-id"], tmp_path / "trace.json", capsys)
    finally:
        for worker in workers:
            worker.close()
        assert router.stop() == 0
    spans = collector.named()
    assert {span.trace_id.hex() for span in collector.spans} == {PARENT.split("-")[1]}
    assert collector.services == {"baton"}
    root = spans["POST /v1/completions"]
    assert root.parent_span_id.hex() == PARENT.split("-")[2]
    assert answer.headers["traceresponse"].split("-")[2] == root.span_id.hex()
    within = {
        "router": {"tokenize", "tokenizer_dispatch"},
        "prefill": {"prefill_waiting", "prefill_forward", "prefill_transfer_kv_cache"},
        "decode": {"decode_bootstrap", "decode_loop"},
    }
    for name, stages in within.items():
        part = spans[name]
        assert part.parent_span_id == root.span_id
        inside = [span for span in collector.spans if span.parent_span_id == part.span_id]
        assert {span.name for span in inside} == stages
        for span in inside:
            assert part.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= part.end_time_unix_nano
    about = {one.key: one.value for one in spans["router"].attributes}
    assert about["gen_ai.usage.output_tokens"].int_value == 3
    assert about["baton.ends"].string_value == "length"
    ends = {one.key: one.value for one in spans["decode"].attributes}
    assert ends["baton.kv_bytes"].int_value == 1024
    assert ends["baton.worker"].string_value == workers[1].record.id
    assert len(collector.spans) == 4 + sum(map(len, within.values()))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/v1/completions", 200), ("/v1/completions", 200), ("/v1/completions", 404),
    ]  # fmt: skip
    told, refused = lines[1:]
    assert told["trace_id"] == PARENT.split("-")[1]
    assert told["request_id"] == answer.headers["x-request-id"]
    assert 0 < told["generated"].pop("ttft_s") <= told["seconds"]
    told["generated"].pop("kv_bytes", 0)  # D may say it later
    assert told["generated"] == {
        "model": "tiny", "tenant": "", "choices": 1, "prompt_tokens": 1, "cached_tokens": 0,
        "output_tokens": 3,
        "ends": ["length"], "workers": [[worker.record.id for worker in workers]],
    }  # fmt: skip
    assert refused["error"] == "model_not_found"
    assert "generated" not in refused
