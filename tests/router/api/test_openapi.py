"""The OpenAPI document: it has every path of the API, and says what is true."""

from __future__ import annotations

import pytest
import schemathesis

from router.api import docs_page
from router.api.app import _ROUTES
from router.api.openapi import _BODIES, document
from router.api.request_body import parse
from tests.router.conftest import RouterProcess


def test_it_has_every_path_of_the_api() -> None:
    said = {(method.upper(), path) for path, item in document("m")["paths"].items() for method in item}
    below = {("GET", "/v1/models/{model}"), ("GET", "/v1/responses/{id}"), ("DELETE", "/v1/responses/{id}")}
    assert said == {*_ROUTES, *below} - {("GET", path) for path in docs_page.PATHS}


def test_it_is_what_the_router_serves(router: RouterProcess) -> None:
    assert router.http.get("/openapi.json").json() == document("tiny")


def test_a_page_shows_it(router: RouterProcess) -> None:
    page = router.http.get("/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for name, kind in (("docs/docs.js", "text/javascript"), ("docs/docs.css", "text/css")):
        assert f'"{name}"' in page.text
        part = router.http.get(f"/{name}")
        assert part.status_code == 200
        assert part.headers["content-type"].startswith(kind)
    assert "connect-src 'self'" in page.headers["content-security-policy"]


def test_a_tool_can_read_it() -> None:
    schema = schemathesis.openapi.from_dict(document("m"))
    assert len(list(schema.get_all_operations())) == sum(map(len, document("m")["paths"].values()))
    schema.validate()


def test_its_examples_are_valid() -> None:
    schemas = document("m")["components"]["schemas"]
    bodies = [body for body in _BODIES if "examples" in schemas[body.__name__]]
    assert len(bodies) == 9
    for body in bodies:
        parse(body, schemas[body.__name__]["examples"][0])


@pytest.mark.parametrize("field", ["temperature", "stream", "logit_bias"])
def test_null_counts_as_absent(field: str) -> None:
    said = document("m")["components"]["schemas"]["ChatBody"]["properties"][field]
    assert {"type": "null"} in said["anyOf"]
