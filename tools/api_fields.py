"""`python -m tools.api_fields`: write docs/api.md's tables of fields, from the models that parse requests.

A row for each field that a body here has, or that OpenAI's API, vLLM or SGLang takes (peer_fields.json: the
names in their request models).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from router.api.anthropic.schema import MessagesBody
from router.api.native_endpoints import GenerateBody, NativeSampling
from router.api.openai.embeddings import EmbeddingBody
from router.api.openai.responses.schema import ResponseBody
from router.api.openai.schema import ChatBody, CompletionBody
from router.api.other_fields import OTHER_FIELDS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
PEERS: dict[str, dict[str, list[str]]] = json.loads((Path(__file__).parent / "peer_fields.json").read_text())
BODIES: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponseBody,
    "/v1/embeddings": EmbeddingBody,
    "/v1/messages": MessagesBody,
    "/generate": GenerateBody,
    "sampling_params of /generate": NativeSampling,
}
BEGIN, END = "<!-- fields: python -m tools.api_fields -->", "<!-- end of fields -->"


def tables() -> str:
    """All tables, as Markdown."""
    return "\n".join(f"### {place}\n\n{_table(place, body)}" for place, body in BODIES.items())


def with_tables(page: str) -> str:
    """A page with these tables in their place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def _table(place: str, body: type[BaseModel]) -> str:
    names = {*body.model_fields, *(name for taken in PEERS.values() for name in taken.get(place, ()))}
    rows = [f"| `{name}` | {_takers(place, name)} | {_here(body, name)} |\n" for name in sorted(names)]
    return "| field | also taken by | here |\n|---|---|---|\n" + "".join(rows)


def _takers(place: str, name: str) -> str:
    return ", ".join(peer for peer, taken in PEERS.items() if name in taken.get(place, ()))


def _here(body: type[BaseModel], name: str) -> str:
    field = body.model_fields.get(name)
    if field is not None:
        return f"yes: {field.description}" if field.description else "yes"
    other = OTHER_FIELDS[name]
    if other.harmless is None:
        return f"accepted, changes nothing: {other.why}"
    harmless: list[Any] = [value for value in other.harmless if value != 0 or value is False]
    only = " or ".join(f"`{json.dumps(value)}`" for value in harmless)
    return f"refused{f' other than {only}' if only else ''}: {other.why}"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
