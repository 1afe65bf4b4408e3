"""Every error a user or a peer can cause. The router maps the tree to HTTP once (router/http_errors.py).

BatonError
├── UserError                    the caller's mistake; other requests are not affected
│   ├── InvalidRequest      400  a field is wrong, unknown or unsupported
│   ├── ContextTooLong      400  prompt (+ output) does not fit the model or the pool
│   ├── Unauthorized        401  no key, or one that does not hold
│   ├── ModelNotFound       404  no worker serves that model
│   ├── ResponseNotFound    404  no answer of that id is kept for its tenant
│   ├── BodyTooLarge        413  its body has more bytes than the router takes
│   ├── UnsupportedMedia    415  its body is not JSON, or packed otherwise than with gzip
│   ├── LateBody            408  the rest of its body did not come in time
│   ├── SlowClient          400  its stream waits unread; sent in the stream, after status 200
│   └── Overloaded          429  try again after `retry_after_s`
├── Unavailable             503  no worker can take the request within its bound
│   └── Interrupted         503  this router ends a stream with which another can go on
├── Aborted                 410  an operator has ended the request
├── TimeLimit               504  the request ran for as long as a request may
├── RequestFailed           500  the model has no usable output for this request (logits that are not finite)
├── PeerError                    another process sent something wrong, or is gone
│   ├── WireError                a frame does not decode, or its values are impossible
│   ├── TransferError            KV pages did not arrive
│   │   └── PageDiffers          a page is not what was sent
│   └── WorkerLost               a lease ended or a process died
└── ConfigError                  exit code 2: names the key, the problem and the remedy

A bug in Baton is an `assert`, never one of these.
"""

from __future__ import annotations


class BatonError(Exception):
    """Root of all errors that users or other processes cause."""


class UserError(BatonError):
    """The caller's mistake. `param` is the field of the request that is wrong, if it is one."""

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


class Unauthorized(UserError):
    """The door has keys, and none of them was shown."""


class ModelNotFound(UserError):
    """No worker serves that model."""


class ResponseNotFound(UserError):
    """No answer of that id is kept for this tenant."""


class BodyTooLarge(UserError):
    """The body of a request has more bytes than are taken."""


class UnsupportedMedia(UserError):
    """The body of a request is of a type, or packed in a way, that is not taken."""


class LateBody(UserError):
    """The body of a request was not complete in time."""


class SlowClient(UserError):
    """A client does not read its stream: too much of it waits."""


class Overloaded(UserError):
    """Too much is queued already; try again after `retry_after_s` seconds. `cause` is for metrics."""

    def __init__(self, message: str, retry_after_s: float, cause: str = "queue") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.cause = cause


class Unavailable(BatonError):
    """No worker could take the request within its bound."""


class Aborted(BatonError):
    """An operator has ended the request. No client is meant to try again."""


class TimeLimit(BatonError):
    """The request ran for as long as a request may, and had not ended."""


class RequestFailed(BatonError):
    """The model has no usable output for this request. Another try would most likely fail too."""


class Interrupted(Unavailable):
    """This router ends a stream with which another can go on."""


class PeerError(BatonError):
    """Another process sent something wrong, or is gone."""


class WireError(PeerError):
    """A frame does not decode, or its values are impossible."""


class TransferError(PeerError):
    """KV pages did not arrive."""


class PageDiffers(TransferError):
    """The checksum of a page is not what the sender computed. The page must not be read."""


class WorkerLost(PeerError):
    """A worker's lease ended or its process died."""


class ConfigError(BatonError):
    """A configuration that cannot work: `key` is what to change, `problem` why, `remedy` how."""

    def __init__(self, key: str, problem: str, remedy: str) -> None:
        super().__init__(f"{key}: {problem}; {remedy}")
        self.key = key
        self.problem = problem
        self.remedy = remedy
