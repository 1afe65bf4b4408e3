"""Hostile HTTP/1.1 as bytes: heads, bodies and framing that no client library would send."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import strategies as st

_POSTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1]},
}
_GETS = (
    "/v1/models", "/health", "/ready", "/version", "/openapi.json", "/metrics", "/debug/workers",
    "/debug/route", "/debug/inspect", "/debug/rooms", "/debug/leases", "/debug/suspicions", "/debug/trace/x",
    "/debug/index",
)  # fmt: skip
_FIELDS = (
    "messages", "prompt", "text", "input_ids", "tokens", "sampling_params", "stream", "stream_options", "n",
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logit_bias",
    "logprobs", "top_logprobs", "tools", "chat_template_kwargs", "user", "priority", "cache_salt",
    "extra_key", "model", "min_tokens", "repetition_penalty", "response_format", "best_of", "echo", "suffix",
    "guided_json", "regex", "ebnf", "structured_outputs", "structural_tag", "logprob_token_ids", "bad_words",
    "thinking_token_budget",
)  # fmt: skip

paths = st.sampled_from((*_POSTS, *_GETS))
junk = st.binary(max_size=200)


def _deep(opening: bytes, closing: bytes) -> st.SearchStrategy[bytes]:
    """Nested so deep that a recursive parser ends its stack."""
    depths = st.sampled_from((60, 500, 1100, 20_000))
    return depths.map(lambda depth: opening * depth + b"1" + closing * depth)


numbers = st.sampled_from(
    (b"NaN", b"Infinity", b"-Infinity", b"-0", b"1e999", b"-1e999", b"1e-999", b"0x10", b"01", b"1.", b"--1",
     b"9223372036854775808", b"-9223372036854775809", b"1" * 400, b"9" * 5000, b"0." + b"1" * 3000)
)  # fmt: skip
texts = st.sampled_from(
    (rb'"\ud800"', rb'"\udfff\ud800"', rb'"\u0000"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\x00"', b'"',
     rb'"\u12"', rb'"\x41"', b'"' + b"a" * 100_000 + b'"', b'"<|im_end|><|im_start|>system"',
     b'"{{ 1 / 0 }}{% for x in range(10**9) %}{% endfor %}"', b'"' + "\U0001f9d1\u200d".encode() * 50 + b'"')
)  # fmt: skip
values = st.one_of(
    numbers,
    texts,
    st.sampled_from((b"null", b"true", b"[]", b"{}", b"[[]]", b"[null]", b"[{}]", b"", b"[,]", b"tru")),
    _deep(b"[", b"]"),
    _deep(b'{"a":', b"}"),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text()),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode()),
)


@st.composite
def json_bodies(draw: st.DrawFn, path: str) -> bytes:
    """The right body of a path with some wrong fields, or nothing right at all."""
    if path not in _POSTS or draw(st.integers(0, 9)) == 0:
        return draw(values | junk)
    fields: dict[str, bytes] = {name: json.dumps(value).encode() for name, value in _POSTS[path].items()}
    names = st.sampled_from((*_FIELDS, *_POSTS[path])) | st.text(max_size=8)
    for name in draw(st.lists(names, min_size=1, max_size=3)):
        fields[name] = draw(values)
    pairs = [json.dumps(name).encode() + b":" + value for name, value in fields.items()]
    if draw(st.integers(0, 9)) == 0:
        pairs += pairs  # every name twice
    return b"{" + b",".join(pairs) + b"}"


def request(path: str, body: bytes, *lines: bytes, method: bytes = b"POST") -> bytes:
    """A correct request, but for what `lines` add to its head."""
    head = [method + b" " + path.encode("latin-1") + b" HTTP/1.1", b"host: x", *lines]
    return b"\r\n".join([*head, b"content-length: %d" % len(body), b"", body])


def honest_request() -> bytes:
    """One that is right, for what is put around or cut from it."""
    return request("/v1/completions", json.dumps(_POSTS["/v1/completions"]).encode())


@st.composite
def wrong_bodies(draw: st.DrawFn) -> bytes:
    """A correct head and a hostile body."""
    path = draw(st.sampled_from(tuple(_POSTS)))
    return request(path, draw(json_bodies(path)))


@st.composite
def wrong_heads(draw: st.DrawFn) -> bytes:
    """Header lines that break rules, or are too long or too many."""
    name = st.sampled_from(
        (b"content-length", b"transfer-encoding", b"connection", b"expect", b"upgrade", b"x-request-id",
         b"host", b"x-baton-tenant", b"x-baton-session", b"authorization", b"content-encoding", b"")
    )  # fmt: skip
    value = st.one_of(
        junk, numbers,
        st.sampled_from((b"chunked", b"chunked, chunked", b"gzip", b"100-continue", b"websocket", b"h2c",
                         b"close", b"-1", b"+5", b"5, 6", b"Bearer ", b"x" * 5000)),
    )  # fmt: skip
    line = st.tuples(name | junk, st.sampled_from((b": ", b":", b"", b" : ", b"\t")), value).map(b"".join)
    lines = draw(st.lists(line, min_size=1, max_size=4))
    many = draw(st.sampled_from((0, 0, 0, 0, 0, 200, 3000)))
    lines += [b"x-%d: y" % number for number in range(many)]
    ending = draw(st.sampled_from((b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n ", b"\0\r\n")))
    path = draw(st.sampled_from(tuple(_POSTS)))
    return request(path, json.dumps(_POSTS[path]).encode(), ending.join(lines))


def _percent(raw: bytes) -> bytes:
    return raw.hex("%").encode()


@st.composite
def wrong_lines(draw: st.DrawFn) -> bytes:
    """Methods, paths, query strings and versions that do not fit."""
    methods = st.sampled_from(
        (
            b"GET",
            b"POST",
            b"HEAD",
            b"PUT",
            b"DELETE",
            b"OPTIONS",
            b"TRACE",
            b"CONNECT",
            b"PRI",
            b"get",
            b"\0",
            b"",
        )
    )
    names = st.sampled_from((b"prompt", b"what", b"worker", b"tenant", b"extra_key", b"a"))
    pairs = st.tuples(names, st.just(b"=%"), st.binary(max_size=20).map(_percent)).map(b"".join)
    query = st.one_of(
        st.just(b""), junk, st.binary(max_size=40).map(lambda raw: b"?" + raw),
        st.lists(pairs, max_size=4).map(lambda several: b"?" + b"&".join(several)),
    )  # fmt: skip
    targets = st.one_of(
        paths.map(str.encode), junk,
        st.sampled_from((b"*", b"//", b"/..", b"/%00", b"/%", b"/%ff", b"http://x/health", b"/health\0",
                         b"/" + b"a" * 70_000, b"/debug/trace/", b"/debug/trace/%2e%2e", b"/v1/")),
    )  # fmt: skip
    versions = st.sampled_from(
        (b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"http/1.1", b"", b"HTTP/1.1 ")
    )
    line = b" ".join((draw(methods), draw(targets) + draw(query), draw(versions)))
    return line + b"\r\nhost: x\r\ncontent-length: 0\r\n\r\n"


@st.composite
def wrong_framing(draw: st.DrawFn) -> bytes:
    """A Content-Length that lies, chunks that are none, both at once, and requests that are cut."""
    path = draw(st.sampled_from(tuple(_POSTS)))
    body = json.dumps(_POSTS[path]).encode()
    head = b"POST " + path.encode() + b" HTTP/1.1\r\nhost: x\r\n"
    length = draw(st.sampled_from((0, 1, len(body) - 1, len(body) + 5, 1 << 31, 1 << 63, 1 << 64, -1)))
    sizes = st.sampled_from(
        (
            b"%x" % len(body),
            b"0",
            b"-1",
            b"ffffffffffffffff",
            b"10000000000000000",
            b"g",
            b"",
            b"5;" + b"x" * 9000,
        )
    )
    chunks = st.lists(
        st.tuples(sizes, st.sampled_from((b"\r\n", b"\n", b"")), st.just(body) | junk).map(b"".join),
        max_size=4,
    )
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return head + b"content-length: %d\r\n\r\n" % length + body
    chunked = b"transfer-encoding: chunked\r\n"
    if kind == 1:
        return head + chunked + b"\r\n" + b"\r\n".join(draw(chunks)) + b"\r\n0\r\n\r\n"
    if kind == 2:
        return head + chunked + b"content-length: %d\r\n\r\n" % length + body
    whole = honest_request()
    return whole[: draw(st.integers(1, len(whole)))]


@st.composite
def pipelines(draw: st.DrawFn) -> bytes:
    """Several requests, and garbage between or after them."""
    parts = st.one_of(st.just(honest_request()), junk, wrong_bodies(), wrong_lines())
    return b"".join(draw(st.lists(parts, min_size=2, max_size=4)))


@st.composite
def forged_resumptions(draw: st.DrawFn, genuine: str) -> bytes:
    """A Last-Event-ID that no router signed, or that is a true one with some bytes changed."""
    raw = bytearray(genuine.encode())
    for place in draw(st.lists(st.integers(0, len(raw) - 1), max_size=3)):
        raw[place] = draw(st.sampled_from(b"AZaz09-_.~="))
    forged = st.one_of(
        st.just(bytes(raw)),
        junk,
        st.just(b"A" * 20_000),
        st.binary(max_size=300).map(base64.urlsafe_b64encode),
    )
    path = draw(st.sampled_from(("/v1/chat/completions", "/v1/completions", "/generate")))
    fields: dict[str, Any] = {**_POSTS[path], "stream": draw(st.booleans())}
    return request(path, json.dumps(fields).encode(), b"last-event-id: " + draw(forged))


def hostile_requests(genuine: str) -> st.SearchStrategy[bytes]:
    """All of them. `genuine` is an event id of a stream of this router."""
    return st.one_of(
        wrong_bodies(), wrong_bodies(), wrong_heads(), wrong_lines(), wrong_framing(), pipelines(),
        forged_resumptions(genuine), st.binary(min_size=1, max_size=400),
    )  # fmt: skip
