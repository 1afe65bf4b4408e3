"""Whether the models of a configuration can be served, before Ray is started for them."""

from __future__ import annotations

from pathlib import Path

from cluster.config import ServeConfig
from common.errors import ConfigError
from engine.gate import check_model
from engine.model_config import read_config
from engine.text_part import text_part
from router.text.chat_template import template_text
from router.text.output_formats import check_parsers
from router.text.sampling_defaults import read_defaults


def check_models(config: ServeConfig) -> None:
    """Raises ConfigError for a model that the engine does not compute, or whose files are unusable.

    Its models are directories of this machine.
    """
    for one in config.served:
        directory = Path(one.model)
        read_defaults(directory, one.generation_config)
        check_parsers(one.tool_call_parser, one.reasoning_parser)
        if one.chat_template is not None:
            template_text(one.chat_template)
        fake = {config.worker_options(key).engine for key in config.worker_sections()} == {"fake"}
        if fake:
            continue
        try:
            found = read_config(directory, local=True)
        except (OSError, ValueError) as error:
            raise ConfigError("model", f"{directory}: {error}", "give a checkpoint of a causal LM") from None
        check_model(text_part(found))
