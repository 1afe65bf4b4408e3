"""What bench.router runs: the load generator, prompts, fake workers, a router; and how much CPU that used."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.compiled import compiled
from bench.router_worker import router_worker
from router.text.tokenization import Tokenization
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

    @property
    def url(self) -> str:
        """Its HTTP address."""
        return f"http://{self.host}:{self.port}"


@dataclass(frozen=True)
class Shot:
    """One measurement. Milliseconds, shares of a core, microseconds of the router's CPU per request."""

    rps: float
    first_ms: float
    load_cpu_share: float
    router_us: float | None


def write_prompts(path: Path, model: Path, count: int, seed: int = 0) -> None:
    """`count` different texts of exactly PROMPT_TOKENS tokens each, a JSON string a line.

    They are made of the words of this repository's own documents, so that the tokenizer has words of one and
    of several tokens to merge.
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
            chosen, left = [], PROMPT_TOKENS - 1  # the first token is the lead's
            while left:
                word = rng.choice(words if left > _LONGEST_WORD else single)
                chosen.append(word)
                left -= sizes[word]
            prompt = "- " + " ".join(chosen)
            if len(tokenization.encode(prompt)) == PROMPT_TOKENS:
                file.write(json.dumps(prompt) + "\n")
                written += 1


class LoadGenerator:
    """Fires shots. Prompts are taken in turn, so that none is sent twice before all were."""

    def __init__(self, prompts: Path, chat: bool, exact: bool = True, extra: str = _EXTRA) -> None:
        """`extra`: fields of every request beside model, prompt, max_tokens and stream; a JSON object."""
        self._binary = compiled("load_generator")
        self._prompts = prompts
        self._chat = chat
        self._exact = exact  # one event per token: our own promise, not every server's
        self._extra = {**json.loads(extra), "stream": True}
        self._sent = 0

    def fire(self, at: Endpoint, connections: int, tokens: int, seconds: float) -> Shot:
        """Closed loop over that many connections. Raises CalledProcessError for an answer that is wrong."""
        lead = '"messages":[{"role":"user","content":' if self._chat else '"prompt":'
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        head = f'{{"model":{json.dumps(at.model)},{lead}'
        rest = json.dumps({"max_tokens": tokens, **self._extra})[1:]
        tail = ("}]," if self._chat else ",") + rest
        options: dict[str, Any] = {
            "host": at.host, "port": at.port, "path": path, "prompts": self._prompts, "first": self._sent,
            "head": head, "tail": tail, "connections": connections, "seconds": seconds,
            "warmup": seconds / 5, "events": tokens if self._exact else 0,
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
def bare_router(model: Path, name: str, scratch: Path, processes: int = 1) -> Iterator[tuple[Endpoint, str]]:
    """`python -m router --processes` on a free port, and its directory's mailbox address."""
    path = scratch / "router.json"
    path.write_text(json.dumps({"model": str(model), "served_model_name": name, "port": 0}))
    words = ("--options", path, "--processes", processes)
    with _process("router", *words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        host, _, port = ready["http"].removeprefix("http://").rpartition(":")
        yield Endpoint(host, int(port), name, process.pid), ready["mailbox"]


@contextmanager
def served_router(
    model: Path, name: str, scratch: Path, ingress: str, replicas: int = 1
) -> Iterator[tuple[Endpoint, str]]:
    """The same router under Ray Serve (bench/router_serve.py), and its directory's mailbox address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    where = ("--port", port, "--scratch", scratch, "--ingress", ingress)
    options = ("--model", model, "--served-model", name, "--replicas", replicas, *where)
    with _process("bench.router_serve", *options, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        yield Endpoint("127.0.0.1", port, name, process.pid), ready["directory"]


@contextmanager
def workers(at: Endpoint, directory: str, step_ms: float = 0.0) -> Iterator[None]:
    """One prefill and one decode worker, known to the router at `at`."""
    with ExitStack() as cleanup:
        for role in Role:
            cleanup.enter_context(router_worker(role, directory, at.model, step_ms=step_ms))
        deadline = time.monotonic() + _READY_S
        while len(_get(at, "/debug/workers")["workers"]) < len(Role):
            if time.monotonic() > deadline:
                raise RuntimeError("the router does not see its workers")
            time.sleep(0.05)
        yield


def worker_own_ms(at: Endpoint) -> float | None:
    """Median of what prefill workers needed themselves since this was last asked; None: nobody says."""
    prefill = [record for record in _get(at, "/debug/workers")["workers"] if record["role"] == Role.PREFILL]
    said = [_get(at, f"/debug/inspect?worker={record['id']}&what=load")["own_ms"] for record in prefill]
    known = [own_ms for own_ms in said if own_ms is not None]
    return max(known) if known else None


def router_cpu_seconds(at: Endpoint) -> float:
    """CPU time so far of the processes through which requests go, as the scheduler counts it."""
    total = 0
    for pid in _router_pids(at.root) if at.root is not None else ():
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def _router_pids(root: int) -> list[int]:
    """The bare router; or Serve's replica with HAProxy or Serve's own proxy, which come and go."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except (OSError, UnicodeDecodeError):
                continue  # it has ended, or is none of ours
            parents[int(entry.name)] = int(stat[1])

    def below(pid: int) -> bool:
        while pid > 1 and pid != root:
            pid = parents.get(pid, 0)
        return pid == root

    return [pid for pid, title in titles.items() if any(word in title for word in _ROUTERS) and below(pid)]


def _get(at: Endpoint, path: str) -> Any:
    with urllib.request.urlopen(at.url + path, timeout=10) as answer:
        return json.load(answer)


@contextmanager
def _process(module: str, *options: object, stdout: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-m", module, *map(str, options)], cwd=ROOT, stdout=stdout)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
