"""How a model wants to be sampled where a request says nothing: its generation_config.json.

`--generation-config` names which, with vLLM's words: "auto" is the model's own, "vllm" none (neutral values),
else a folder that has one. As in vLLM, `do_sample` is not read. Its list of end tokens is the workers'
(engine/loader.py), which read it with the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import ConfigError, InvalidRequest
from router.text.json_files import read_json
from wire.request import SamplingParams
from wire.sampling_ranges import check_sampling

AUTO = "auto"
NEUTRAL = "vllm"
_FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_defaults(model: Path, source: str) -> SamplingDefaults:
    """The defaults of `source` for a model. Raises ConfigError for a folder without a usable file."""
    if source == NEUTRAL:
        return SamplingDefaults()
    path = (model if source == AUTO else Path(source)) / _FILE
    if source != AUTO and not path.is_file():
        raise ConfigError("generation_config", f"{source} has no {_FILE}", "name a folder, auto or vllm")
    written = read_json(path)
    given = {name: written[name] for name in SamplingDefaults.__slots__ if written.get(name) is not None}
    given["top_k"] = max(0, given.get("top_k", 0))  # -1: off
    try:
        check_sampling(SamplingParams(**_numbers(given)))
    except InvalidRequest as error:
        raise ConfigError("generation_config", f"{path}: {error}", "repair it, or say vllm") from None
    return SamplingDefaults(**given)


def _numbers(given: dict[str, Any]) -> dict[str, Any]:
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float)):
            raise InvalidRequest(f"{name} is no number", name)
    return given
