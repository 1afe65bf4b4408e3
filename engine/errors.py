"""Errors that the engine raises.

common.errors.BatonError
├── ConfigError
│   └── UnsupportedModel   the checkpoint has a feature that the engine does not compute; key `model`
├── InvalidRequest
│   └── NothingAllowed     a sequence has no next token, because of its grammar
└── EngineError            a launched forward failed; the requests of its batch must be restarted
    └── DeviceLost         its device is not done in time, or failed: the engine is unusable
"""

from __future__ import annotations

from common.errors import BatonError, ConfigError, InvalidRequest


class UnsupportedModel(ConfigError):
    """The gate refuses a checkpoint. `problem` names the feature and its key in config.json."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__("model", problem, remedy)


class NothingAllowed(InvalidRequest):
    """A sequence has no next token, because of its grammar. It would have none on any worker."""


class EngineError(BatonError):
    """A forward failed. Nothing was sampled, and what it wrote to its out_slots is not valid KV."""


class DeviceLost(EngineError):
    """What the device still does is unknown. Nothing that a launched forward can touch may be freed, and no
    later forward will run."""
