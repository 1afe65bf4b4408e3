"""A ConfigError on its way from a replica's constructor to the terminal.

Serve reports a failed constructor as text: the traceback, inside the deployment's status message. The replica
marks the ConfigError in that text, and `find_refusal` reads it back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

from common.errors import ConfigError

_MARK = "baton-config-error"
_MARKED = re.compile(_MARK + r"(\{.*?\})" + _MARK)


class ReplicaRefused(RuntimeError):
    """A replica cannot start with its configuration; the message carries the ConfigError."""


@contextmanager
def readable_refusal() -> Iterator[None]:
    """A ConfigError inside becomes a ReplicaRefused that `find_refusal` can read back."""
    try:
        yield
    except ConfigError as error:
        packed = json.dumps({"key": error.key, "problem": error.problem, "remedy": error.remedy})
        raise ReplicaRefused(f"{_MARK}{packed}{_MARK}") from error


def find_refusal(status_message: str) -> ConfigError | None:
    """The ConfigError that a replica marked in a deployment's status message, if there is one."""
    found = _MARKED.search(status_message)
    return None if found is None else ConfigError(**json.loads(found.group(1)))
