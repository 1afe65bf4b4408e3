"""The servers that the clients talk to: the demo model, and a random one, both in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.harness.local_stack import Stack, stack
from tests.support.tiny_models import make_tiny

ROOT = Path(__file__).resolve().parents[2]
_CONTEXT_TOKENS = 2048
_TEMPLATE = """\
{%- if tools %}<|im_start|>system
Tools:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A chat template that knows tools, as Qwen's do."""


@dataclass(frozen=True)
class Server:
    """A running stack, and the model's files."""

    name: str
    files: Path
    running: Stack

    def variables(self) -> dict[str, str]:
        """What a script reads (scripts/common.py)."""
        return {
            "BATON_URL": self.running.url,
            "BATON_MODEL": "m",
            "BATON_MODEL_FILES": str(self.files),
            "BATON_TRAINED": "1" if self.name == "demo" else "0",
        }


@contextmanager
def servers(folder: Path) -> Iterator[list[Server]]:
    """Both, until the end. Pools must balance then."""
    random = make_tiny("qwen3", folder / "random-model", 1)
    _set_template(random)
    with ExitStack() as cleanup:
        found = []
        for name, files in (("demo", ROOT / "deploy/demo_model"), ("random", random)):
            (folder / name).mkdir()
            running = cleanup.enter_context(
                stack(
                    files,
                    folder / name,
                    dtype="float32",
                    max_total_tokens=8 * _CONTEXT_TOKENS,
                    max_context_tokens=_CONTEXT_TOKENS,
                )
            )
            found.append(Server(name, files, running))
        yield found
        for server in found:
            server.running.settle()


def _set_template(files: Path) -> None:
    path = files / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": _TEMPLATE}))
