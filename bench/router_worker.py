"""A worker without a model for bench.router: starts bench/fake_worker and gives it its messages.

The program knows the course of a room. What is the same for every room (its record, the layout of its pages)
is made here, with the classes of the wire protocol. Tests use tests/support/fake_worker.py, which keeps to
the whole protocol. Why this one is compiled: docs/decisions/0018-the-bench-compiles-its-fake-worker.md.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import zmq
from zmq.utils import z85

from bench.compiled import compiled
from common.host import host_identity
from common.secrets import ClusterSecret
from wire.codec import encode
from wire.messages.directory import Announce
from wire.messages.transfer import GroupTarget, TransferEndpoint
from wire.records import GroupLayout, Role, WorkerLoad, WorkerRecord, layout_digest
from wire.security import Curve

_PAGE_TOKENS = 16
_PROMPT_PAGES = 16  # that its KVTarget offers; nobody writes them
_ROOMY = WorkerLoad(free_tokens=1 << 24, headroom_tokens=1 << 24, headroom_rows=1 << 12)


@contextmanager
def router_worker(
    role: Role,
    directory: str,
    model: str,
    prefill_ms: float = 0.0,
    step_ms: float = 0.0,
    secret: ClusterSecret | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that serves `model` in that role and announces itself to the directory at this address.

    `prefill_ms`: from a Prefill to token 0. `step_ms`: at least this between two tokens of a room. `secret`:
    of the cluster. Raises BuildError if its program cannot be compiled.
    """
    options = {
        "--role": role, "--directory": directory, "--prefill-ms": prefill_ms, "--step-ms": step_ms,
    }  # fmt: skip
    public = b""
    if secret is not None:
        public, private = zmq.curve_keypair()
        options |= {
            "--public-key": public.decode(),
            "--secret-key": private.decode(),
        }  # of this process alone
    words = [str(word) for pair in options.items() for word in pair]
    program = compiled("fake_worker", "zmq")
    process = subprocess.Popen([program, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        endpoint = process.stdout.readline().decode().strip()
        address = endpoint if secret is None else f"{endpoint}/{z85.decode(public).hex()}"
        proof = b"" if secret is None else Curve(secret).proof(address)
        record = _record(role, address, model, process.pid)
        identity = [address, proof, record.id, encode(Announce(record)), _kv_target(record)]
        process.stdin.write(msgspec.msgpack.encode(identity))
        yield process
    finally:
        process.terminate()
        process.wait(timeout=60)
        process.stdin.close()
        process.stdout.close()


def _record(role: Role, address: str, model: str, pid: int) -> WorkerRecord:
    shape = (2, 2, 2, _PAGE_TOKENS, 8)
    layout = GroupLayout("full", "full", shape, "float32", "plain", _PAGE_TOKENS, 4 * 8 * _PAGE_TOKENS * 8)
    return WorkerRecord(
        id=f"{role}-{pid}", incarnation=time.time_ns(), role=role, mailbox=address, events="", replay="",
        model=model, fingerprint="bench", groups=(layout,), max_context_tokens=1 << 15,
        total_tokens=1 << 24, max_running_requests=1 << 12, pid=pid, host=host_identity(),
        transfer_backends=("shm",), load=_ROOMY,
    )  # fmt: skip


def _kv_target(record: WorkerRecord) -> bytes:
    """What follows room and epoch in a KVTarget: keys and values of a MessagePack map, without its head."""
    rest = {
        "decode": record.id, "host": record.host,
        "layout": layout_digest(record.groups), "endpoints": [TransferEndpoint("shm", "")],
        "groups": {"full": GroupTarget(0, list(range(_PROMPT_PAGES)))},
    }  # fmt: skip
    return msgspec.msgpack.encode(rest)[1:]
