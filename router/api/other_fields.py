"""Fields of other servers' requests that no body here has: what they ask for, and what is answered.

A field that changes nothing in an answer is accepted, and so is a value that asks for nothing. Else the
request is refused by the field's name: an answer to a part of a request may be wrong. A body that has a field
of such a name (schema.py) reads it itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class OtherField:
    """`why` says what the field has to do with an answer, and `harmless` which of its values ask for nothing;
    None: all."""

    why: str
    harmless: tuple[Any, ...] | None = ()

    def check(self, name: str, value: Any) -> None:
        """Raises InvalidRequest for a value that asks for something."""
        if self.harmless is None or value in self.harmless:
            return
        only = f"; only {' or '.join(map(repr, self.harmless))} is taken" if self.harmless else ""
        raise InvalidRequest(f"the field {name!r} is not supported: {self.why}{only}", name)


_NOTHING: tuple[Any, ...] = (False, 0, "", [], {})


def _all(why: str, harmless: tuple[Any, ...] | None, *names: str) -> dict[str, OtherField]:
    return dict.fromkeys(names, OtherField(why, harmless))


OTHER_FIELDS: dict[str, OtherField] = {
    # What changes nothing.
    **_all("answers are not kept", None, "store", "metadata"),
    **_all("there is one tier", None, "service_tier"),
    **_all("nothing is done with it", None, "safety_identifier", "custom_labels", "log_metrics"),
    **_all("a hint for speed", None, "prediction", "prompt_cache_retention", "prompt_cache_options"),
    **_all("each token is sent as it comes", None, "stream_interval"),
    **_all("fast tokenizers put no spaces between tokens", None, "spaces_between_special_tokens"),
    **_all("it is about beam search", None, "length_penalty"),
    **_all("it is about truncating, or about answers without a model", None, "return_token_offsets"),
    **_all(
        "it is about images, audio and video, and only text is taken", None,
        "mm_processor_kwargs", "media_io_kwargs", "mm_payload", "return_mm_kwargs", "max_dynamic_patch",
        "min_dynamic_patch", "use_audio_in_video", "images_config",
    ),
    **_all("reasoning is part of the text", None, "separate_reasoning"),
    **_all("reasoning is streamed as it comes", None, "stream_reasoning"),
    **_all("it is about experts' routes", None, "routed_experts_prompt_start", "routed_experts_start_len"),
    **_all("there is one speed", None, "speed"),
    **_all("nothing is billed or diagnosed", None, "diagnostics", "user_profile_id", "workspace_id"),
    **_all("tools of the server are not run", None, "max_tool_calls"),
    **_all("conversations are used whole, however long they are", None, "context_management"),
    # What would change the answer.
    **_all("reasoning is part of the text", (True,), "include_reasoning"),
    **_all("answers are not judged", (), "moderation"),
    **_all("any word may be said", ([],), "bad_words"),
    **_all("beams are not searched", (False,), "use_beam_search"),
    **_all("answers are not marked", (False,), "watermarking"),
    **_all("thoughts are not counted", (-1,), "thinking_token_budget"),
    **_all("repetitions are not looked for", (), "repetition_detection"),
    **_all("stops are texts and tokens, no expressions", ("", []), "stop_regex"),
    **_all("sampling is not extended", _NOTHING, "custom_logit_processor", "custom_params", "vllm_xargs"),
    **_all("adapters are not served", _NOTHING, "lora_path", "lora_id"),
    **_all("conversations are not kept", _NOTHING, "session_params"),
    **_all("there is no corpus of n-grams", (), "ngram_corpus_id"),
    **_all("log-probabilities are those of the best tokens", _NOTHING, "logprob_token_ids"),
    **_all("a prompt is text or token ids", (), "prompt_embeds", "input_embeds"),
    **_all("only text is taken", _NOTHING, "image_data", "audio_data", "video_data"),
    **_all("only text is answered", (["text"],), "modalities"),
    **_all("only text is answered", (), "audio"),
    **_all("the web is not searched", (), "web_search_options"),
    **_all("models are not told", ("medium",), "verbosity"),
    **_all("they are told at /v1/chat/completions", (0,), "top_logprobs"),
    **_all("prompts are not kept", (), "prompt"),
    **_all("vectors are float32", ("float32",), "embed_dtype"),
    **_all("vectors are little-endian", ("little", "native"), "endianness"),
    **_all("prompts are not cut here", (), "truncate_prompt_tokens"),
    **_all("give all items, or previous_response_id", (), "conversation"),
    **_all("requests are answered at once", (), "background_options"),
    **_all("only text is taken", (), "image"),
    **_all("there are no programs", (), "access_programs"),
    **_all("code is not run", (), "container"),
    **_all("tools are called by the client", ([],), "mcp_servers"),
    **_all("requests run where the workers are", (), "inference_geo"),
    **_all("messages end with what the template writes", (False,), "echo"),
    **_all("the template writes the special tokens", (False,), "add_special_tokens"),
    **_all("templates come from the operator", (), "chat_template"),
    **_all("a chat's prompt is its messages", (), "input_ids"),
    **_all("it is of DeepSeek's encoder", (), "task"),
    **_all("tools are given in tools", _NOTHING, "functions"),
    **_all("tools are given in tools", ("none", "auto"), "function_call"),
    **_all("/tokenize says the prompt", (False,), "return_prompt_text"),
    **_all("return_token_ids gives them", (False,), "return_prompt_token_ids"),
    **_all("usage says what was cached", (False,), "return_cached_tokens_details"),
    **_all("the engine does not give them", (False,), "return_hidden_states", "return_routed_experts"),
    **_all("/generate gives it", (False,), "return_meta_info"),
    **_all("seed is its name here", (), "sampling_seed"),
    **_all("requests are named in the header X-Request-Id", (), "request_id", "rid"),
    **_all(
        "the router chooses the workers", (),
        "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank",
    ),
    **_all("tokens are named by their ids", (False,), "return_text_in_logprobs"),
    **_all("a request has a client that waits", (False,), "background"),
}  # fmt: skip


def take_other_fields(given: dict[str, Any], fields: Iterable[str]) -> None:
    """Remove from a request what asks for nothing. `fields` are those that its body reads itself.

    Raises InvalidRequest for what would change the answer.
    """
    for name in OTHER_FIELDS.keys() & given.keys() - set(fields):
        OTHER_FIELDS[name].check(name, given.pop(name))
