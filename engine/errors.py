"""What the engine can refuse or fail at.

wire.errors.BatonError
├── ConfigError
│   └── UnsupportedModel   this checkpoint has a feature that the engine does not compute; key `model`
└── EngineError            a launched forward failed; the requests of its batch must start again
"""

from __future__ import annotations

from common.errors import BatonError, ConfigError


class UnsupportedModel(ConfigError):
    """The gate refuses a checkpoint. `problem` names the feature and the key of its config.json."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__("model", problem, remedy)


class EngineError(BatonError):
    """One forward failed: nothing was sampled, and what it wrote to its out_slots is not valid KV."""
