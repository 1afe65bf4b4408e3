"""A collector of OpenTelemetry's spans, in this process."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class OtlpCollector:
    """Takes OTLP over HTTP on a free port of loopback."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        spans, services = self.spans, self.services

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for part in ExportTraceServiceRequest.FromString(body).resource_spans:
                    about = {one.key: one.value.string_value for one in part.resource.attributes}
                    services.add(about["service.name"])
                    spans.extend(span for scope in part.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        """Free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def named(self) -> dict[str, Span]:
        """The last span of each name."""
        return {span.name: span for span in self.spans}
