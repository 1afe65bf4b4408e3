"""What bench.router runs: prompts, load generator, router, fake workers; and the CPU time of the router."""

from __future__ import annotations

import json
import random
import re
import secrets
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.common import seconds
from bench.compiled import compiled
from bench.router_worker import router_worker
from common.secrets import ClusterSecret, open_secret
from router.text.tokenization import Tokenization
from tests.harness.processes import Child
from wire.records import Role

ROOT = Path(__file__).parents[1]
PROMPT_TOKENS = 256
_ROUTERS = ("-m router ", "ServeReplica:baton:router", "ProxyActor", "haproxy")
_READY_S = 30.0
_LONGEST_WORD = 8  # tokens
_EXTRA = '{"ignore_eos": true}'


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server under load. `root`: the process below which the router runs, if known."""

    host: str
    port: int
    model: str
    root: int | None = None
    admin: str = ""  # URL of the router's admin listener
    api_key: str = ""
    secret: ClusterSecret | None = None

    @property
    def url(self) -> str:
        """Its HTTP address."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Shot:
    """One measurement: milliseconds, share of a core, microseconds of the router's CPU time per request."""

    rps: float
    first_ms: float
    load_cpu_share: float
    router_us: float | None


def write_prompts(path: Path, model: Path, count: int, seed: int = 0) -> None:
    """Write `count` different texts of exactly PROMPT_TOKENS tokens each, one JSON string per line.

    Their words are those of this repository's documents, so the tokenizer has words of one and of several
    tokens to merge.
    """
    tokenization = Tokenization(model)
    text = " ".join(page.read_text() for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))])
    found = sorted(set(re.findall(r"[A-Za-z]{2,}", text)))
    sizes = {word: len(tokenization.encode(" " + word, add_special_tokens=False)) for word in found}
    words = [word for word in found if sizes[word] <= _LONGEST_WORD]
    single = [word for word in words if sizes[word] == 1]
    rng = random.Random(seed)
    with path.open("w") as file:
        written = 0
        while written < count:
            chosen, left = [], PROMPT_TOKENS - 1  # the first token is "-"
            while left:
                word = rng.choice(words if left > _LONGEST_WORD else single)
                chosen.append(word)
                left -= sizes[word]
            prompt = "- " + " ".join(chosen)
            if len(tokenization.encode(prompt)) == PROMPT_TOKENS:
                file.write(json.dumps(prompt) + "\n")
                written += 1


def tokenize_p50_us(model: Path, prompts: Path) -> float:
    """Microseconds in which the router's tokenizer encodes one of the prompts: the median."""
    encode = Tokenization(model).encode
    texts = [json.loads(line) for line in prompts.read_text().splitlines()]
    for text in texts[:100]:
        encode(text)
    return statistics.median(seconds(partial(encode, text)) for text in texts) * 1e6


class LoadGenerator:
    """Runs bench/load_generator. Prompts are taken in turn: none is sent twice before all were sent."""

    def __init__(self, prompts: Path, chat: bool, exact: bool = True, extra: str = _EXTRA) -> None:
        """`exact`: an answer has one event per token, which not every server promises. `extra`: a JSON object
        of further fields of every request. Raises BuildError if its program cannot be compiled."""
        self._binary = compiled("load_generator")
        self._prompts = prompts
        self._chat = chat
        self._exact = exact
        self._extra = {**json.loads(extra), "stream": True}
        self._sent = 0

    def fire(self, at: Endpoint, connections: int, tokens: int, duration_s: float) -> Shot:
        """Closed loop over `connections`. Raises CalledProcessError if an answer is wrong."""
        lead = '"messages":[{"role":"user","content":' if self._chat else '"prompt":'
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        head = f'{{"model":{json.dumps(at.model)},{lead}'
        rest = json.dumps({"max_tokens": tokens, **self._extra})[1:]
        tail = ("}]," if self._chat else ",") + rest
        options: dict[str, Any] = {
            "host": at.host, "port": at.port, "path": path, "prompts": self._prompts, "first": self._sent,
            "head": head, "tail": tail, "connections": connections, "seconds": duration_s,
            "warmup": duration_s / 5, "events": tokens if self._exact else 0, "key": at.api_key,
        }  # fmt: skip
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        before = router_cpu_seconds(at)
        done = subprocess.run([self._binary, *words], stdout=subprocess.PIPE, check=True, text=True)
        used = router_cpu_seconds(at) - before
        said = json.loads(done.stdout)
        self._sent += said["sent"]
        router_us = used / said["sent"] * 1e6 if at.root is not None else None
        return Shot(said["rps"], said["first_ms_p50"], said["cpu_share"], router_us)


@contextmanager
def bare_router(
    model: Path, name: str, scratch: Path, processes: int = 1, *, secured: bool = False
) -> Iterator[tuple[Endpoint, str]]:
    """`python -m router --processes` on a free port, and its directory's mailbox address. `secured`: it asks
    for one of ten API keys, and its cluster has a secret."""
    options: dict[str, Any] = {"model": str(model), "served_model_name": name, "port": 0, "admin_ports": "0"}
    key, secret = "", None
    if secured:
        scratch = scratch / "secured"
        scratch.mkdir()
        keys = [secrets.token_hex(16) for _ in range(10)]
        key = keys[-1]
        options["api_keys_file"] = _private(scratch / "keys", json.dumps([{"key": one} for one in keys]))
        options["cluster_secret_file"] = _private(scratch / "secret", secrets.token_hex(32))
        secret = open_secret(Path(options["cluster_secret_file"]))
    with Child("router", options, scratch, arguments=("--processes", str(processes))) as router:
        ready = router.wait_ready()
        host, _, port = ready["http"].removeprefix("http://").rpartition(":")
        root = router.process.pid
        yield Endpoint(host, int(port), name, root, ready["admin"], key, secret), ready["mailbox"]


def _private(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


@contextmanager
def served_router(
    model: Path, name: str, scratch: Path, ingress: str, replicas: int = 1
) -> Iterator[tuple[Endpoint, str]]:
    """The same router under Ray Serve (bench/router_serve.py), and its directory's mailbox address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    options = {
        "model": str(model), "served_model": name, "port": port, "scratch": str(scratch), "ingress": ingress,
        "replicas": replicas,
    }  # fmt: skip
    with Child("bench.router_serve", options, scratch) as router:
        ready = router.wait_ready()
        yield Endpoint("127.0.0.1", port, name, router.process.pid, ready["admin"]), ready["directory"]


@contextmanager
def workers(at: Endpoint, directory: str, step_ms: float = 0.0) -> Iterator[None]:
    """One prefill and one decode worker, known to the router at `at`."""
    with ExitStack() as cleanup:
        for role in Role:
            cleanup.enter_context(router_worker(role, directory, at.model, step_ms=step_ms, secret=at.secret))
        deadline = time.monotonic() + _READY_S
        while len(_get(at, "/debug/workers")["workers"]) < len(Role):
            if time.monotonic() > deadline:
                raise RuntimeError(f"the router does not see its workers within {_READY_S:.0f} s")
            time.sleep(0.05)
        yield


def worker_own_ms(at: Endpoint) -> float | None:
    """Median milliseconds that prefill workers took from Prefill to token 0 since the last call; or None."""
    prefill = [record for record in _get(at, "/debug/workers")["workers"] if record["role"] == Role.PREFILL]
    said = [_get(at, f"/debug/inspect?worker={record['id']}&what=load")["own_ms"] for record in prefill]
    known = [own_ms for own_ms in said if own_ms is not None]
    return max(known) if known else None


def router_cpu_seconds(at: Endpoint) -> float:
    """CPU time so far of the processes that requests go through, as the kernel's scheduler counts it."""
    total = 0
    for pid in _router_pids(at.root) if at.root is not None else ():
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _router_pids(root: int) -> list[int]:
    """The bare router's processes, or Serve's replicas with HAProxy or Serve's proxy, which come and go."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue  # it has ended, or belongs to another user
            parents[int(entry.name)] = int(stat[1])

    def below(pid: int) -> bool:
        while pid > 1 and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return [pid for pid, title in titles.items() if any(word in title for word in _ROUTERS) and below(pid)]


def _get(at: Endpoint, path: str) -> Any:
    with urllib.request.urlopen(at.admin + path, timeout=10) as answer:
        return json.load(answer)
