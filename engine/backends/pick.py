"""Picks the backend of one group: the one given by name, or the fastest that can run."""

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
    """The backend cannot serve this group; the message gives the reason. Plain torch can serve it."""


def pick(
    config: EngineConfig,
    plain: Callable[[], Backend],
    cpu: Callable[[], Backend],
    flashinfer: Callable[[], Backend],
) -> Backend:
    """The backend that `config.attention` names. "auto" takes the fastest one that the device has.

    `cpu` and `flashinfer` raise KernelsUnavailable, BackendUnavailable or ImportError if they cannot run.
    "auto" then takes plain torch and logs the reason; for a backend given by name, ConfigError is raised.
    """
    on_cpu = torch.device(config.device).type == "cpu"
    wanted = config.attention
    if wanted == "auto":
        wanted = "cpu" if on_cpu else "flashinfer"
    if wanted == "torch":
        return plain()
    if on_cpu != (wanted == "cpu"):
        problem = f"{wanted!r} does not run on device {config.device}"
        raise ConfigError("attention_backend", problem, "use auto or torch")
    try:
        return cpu() if on_cpu else flashinfer()
    except (KernelsUnavailable, BackendUnavailable, ImportError) as error:
        if config.attention != "auto":
            problem = f"{wanted!r} cannot run: {error}"
            raise ConfigError("attention_backend", problem, "use auto or torch") from error
        log.warning("attention: %s cannot run (%s); using plain torch, which is slower", wanted, error)
        return plain()
