"""docs/api.md has a row for each field of a request, and a reason for each that is refused."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from router.api.other_fields import OTHER_FIELDS
from router.api.request_body import parse
from tools.api_fields import BODIES, PAGE, PEERS, with_tables

EXAMPLES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
    "/v1/embeddings": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/generate": {"text": "a"},
    "sampling_params of /generate": {},
}


def test_the_page_has_the_tables_of_the_models() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), "run: python -m tools.api_fields"


@pytest.mark.parametrize("place", BODIES)
def test_each_field_of_other_servers_is_taken_or_refused_by_name(place: str) -> None:
    body, example = BODIES[place], EXAMPLES[place]
    names = {name for taken in PEERS.values() for name in taken.get(place, ())} - body.model_fields.keys()
    assert names <= OTHER_FIELDS.keys()
    for name in names:
        harmless = OTHER_FIELDS[name].harmless
        for value in ("anything",) if harmless is None else harmless:
            parse(body, {**example, name: value})
        if harmless is not None:
            with pytest.raises(InvalidRequest, match=f"'{name}' is not supported: ") as refused:
                parse(body, {**example, name: "anything"})
            assert refused.value.param == name
