"""One backend for one group: the one that was named, or the fastest that runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.cpu.op import KernelsUnavailable

log = logging.getLogger(__name__)

Backend = TypeVar("Backend")


class BackendUnavailable(RuntimeError):
    """This backend cannot serve this group; the message says why. Plain torch can."""


def pick(
    config: EngineConfig,
    plain: Callable[[], Backend],
    cpu: Callable[[], Backend],
    flashinfer: Callable[[], Backend],
) -> Backend:
    """The backend that `config.attention` names; "auto" takes the fastest that the device has.

    `cpu` and `flashinfer` raise KernelsUnavailable, BackendUnavailable or ImportError where they cannot run.
    For a backend that was named that becomes a ConfigError; "auto" takes plain torch and logs why.
    """
    on_cpu = torch.device(config.device).type == "cpu"
    wanted = config.attention
    if wanted == "auto":
        wanted = "cpu" if on_cpu else "flashinfer"
    if wanted == "torch":
        return plain()
    if on_cpu != (wanted == "cpu"):
        problem = f"{wanted!r} does not run on device {config.device}"
        raise ConfigError("engine.attention", problem, "use auto or torch")
    try:
        return cpu() if on_cpu else flashinfer()
    except (KernelsUnavailable, BackendUnavailable, ImportError) as error:
        if config.attention != "auto":
            problem = f"{wanted!r} cannot run: {error}"
            raise ConfigError("engine.attention", problem, "use auto or torch") from error
        log.warning("attention: %s cannot run (%s); plain torch attends instead, more slowly", wanted, error)
        return plain()
