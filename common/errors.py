"""Every error a user or a peer can cause. The router maps the tree to HTTP once (router/api/http_errors.py).

BatonError
├── UserError               the caller's mistake; nothing is lost by it
│   ├── InvalidRequest      400  a field is wrong, unknown or unsupported
│   ├── ContextTooLong      400  prompt (+ output) does not fit the model or the pool
│   ├── ModelNotFound       404  no worker serves that model
│   ├── SlowClient          400  its stream waits unread (told in the stream: the status is out)
│   └── Overloaded          429  come back after `retry_after_s`
├── Unavailable             503  no worker can take the request within its bound
├── PeerError                    another process spoke wrongly or went away
│   ├── WireError                a frame does not decode, or decodes to nonsense
│   ├── TransferError            KV pages did not arrive
│   └── WorkerLost               a lease ended or a process died
└── ConfigError                  exit code 2: names the key and the remedy

A bug of ours is an `assert`, never one of these.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of everything that is somebody else's mistake or misfortune."""


class UserError(BatonError):
    """The caller's mistake; `param` names the request field when one is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InvalidRequest(UserError):
    """A field is wrong, unknown or unsupported."""


class ContextTooLong(UserError):
    """`wanted` tokens do not fit into `limit`."""

    def __init__(self, wanted: int, limit: int, param: str | None = None) -> None:
        super().__init__(
            f"this request needs {wanted} tokens of context and the model serves at most {limit}", param
        )
        self.wanted = wanted
        self.limit = limit


class ModelNotFound(UserError):
    """No worker serves that model."""


class SlowClient(UserError):
    """Too much of a stream waits for its client to read."""


class Overloaded(UserError):
    """Too much is queued already; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(BatonError):
    """No worker could take the request within its bound."""


class PeerError(BatonError):
    """Another process spoke wrongly or went away."""


class WireError(PeerError):
    """A frame does not decode, or decodes to nonsense."""


class TransferError(PeerError):
    """KV pages did not arrive."""


class WorkerLost(PeerError):
    """A worker's lease ended or its process died."""


class ConfigError(BatonError):
    """A configuration that cannot work: `key` is what to change, `problem` why, `remedy` how."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")
        self.key = key
        self.problem = problem
        self.remedy = remedy
