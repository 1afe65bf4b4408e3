"""The router's options: a JSON file for `python -m router`, an object for cluster/."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from common.errors import ConfigError
from common.host import HTTP_PORT, LOOPBACK
from common.options import Options
from common.ports import Ports, PortText
from common.tenant_labels import MOST_LABELS, TenantLabels
from common.used_ports import LONGEST_LEASE_S
from router.placement_options import AdmissionOptions, PlacementOptions
from wire.options import SocketOptions

MOST_WEIGHT = 1e9
MetricsCompat = Literal["vllm"]
VersionWeights = dict[str, Annotated[float, Field(ge=0, le=MOST_WEIGHT)]]


class RoomOptions(Options):
    """Bounds on what a room waits for."""

    worker_wait_s: float = Field(300.0, gt=0, description="for a worker to appear; then 503")
    version_wait_s: float = Field(
        30.0, gt=0,
        description="for a worker of the version on which a stream began, while another version serves; then "
        "503",
    )  # fmt: skip
    hold_prefill_s: float = Field(2.0, gt=0, description="Prefill waits for Reserved at most this long")
    receipt_timeout_s: float = Field(
        15.0, gt=0, description="a worker that acknowledges nothing that long, and whose loop turns, is left"
    )
    max_request_s: float | None = Field(
        None, gt=0,
        description="a request that has run for so long ends with a 504, or an error in its stream; null: it "
        "runs for as long as its client waits",
    )  # fmt: skip
    silence_s: float = Field(1.0, gt=0, description="before the router asks a worker where a room is")
    max_restarts: int = Field(
        5, ge=0, description="of a room since its last new token; those for leaving workers and for broken "
        "links between two workers do not count",
    )  # fmt: skip


class ResumeOptions(Options):
    """Streams that another router goes on with (docs/resuming.md)."""

    resume_key: str | None = Field(
        None, min_length=16,
        description="signs the ids of streams, the same in all routers; null: derived from each of "
        "the cluster's secrets, or random when there is none",
    )  # fmt: skip
    resume_valid_s: float = Field(
        86_400.0, gt=0, lt=2**31, description="how long a client may use a stream's ids"
    )


class HttpOptions(Options):
    """Bounds on what a client may send and keep waiting, and whose pages may ask."""

    cors_origins: tuple[str, ...] = Field(
        (),
        description="sites whose pages may read answers in a browser, as https://example.org; *: all; none: "
        "no page of another site",
    )

    max_body_bytes: int = Field(64 << 20, ge=1024, description="of a request; beyond: 413")
    body_timeout_s: float = Field(
        300.0, gt=0, description="from the head of a request to the end of its body; then 408"
    )
    unread_timeout_s: float = Field(
        60.0, gt=0, description="a client that reads nothing of its stream for longer is left"
    )


class ResponseOptions(Options):
    """Answers of /v1/responses that are kept, in memory, for requests that go on from them (docs/api.md)."""

    kept_responses: int = Field(10_000, ge=0, description="at most; 0: none is kept")
    kept_responses_bytes: int = Field(64 << 20, ge=0, description="of all of them together")
    kept_responses_s: float = Field(86_400.0, gt=0, description="for this long")


class EmbeddingOptions(Options):
    """/v1/embeddings."""

    pooling: Literal["last", "mean"] = Field(
        "last",
        description="what makes the vector of a text, unless its request says: the hidden state of the last "
        "token, or the mean of all tokens'",
    )


class LeaseOptions(Options):
    """The directory that a router hosts."""

    lease_s: float = Field(
        5.0, gt=0, le=LONGEST_LEASE_S, description="a worker that is silent for longer counts as lost"
    )


class KeyOptions(Options):
    """Who may use the API, and on whose behalf (docs/doors.md)."""

    api_keys_file: Path | None = Field(
        None, description="API keys with their tenants; null: BATON_API_KEYS, or no keys"
    )
    trusted_tenant_header: str | None = Field(
        None, min_length=1,
        description="the header with which a gateway names the tenant, such as X-Baton-Tenant; null: none. "
        "With API keys, only the keys of gateways may use it",
    )  # fmt: skip


class PublicPrefix(Options):
    """A beginning of prompts that is public, given as a text or as a file with it."""

    text: str | None = Field(None, min_length=1, description="the text")
    file: Path | None = Field(None, description="or a UTF-8 file with it; a newline at its end is no part")
    form: Literal["system", "prompt"] = Field(
        "system",
        description="system: a system message, which the chat template writes; prompt: the beginning of a "
        "prompt that is given as text",
    )

    @model_validator(mode="after")
    def _one_source(self) -> PublicPrefix:
        if (self.text is None) == (self.file is None):
            raise ValueError("give either text or file")
        return self

    def read(self) -> str:
        """The text. Raises ConfigError for a file that cannot be read, or is empty."""
        if self.file is None:
            return self.text or ""
        try:
            text = self.file.read_text(encoding="utf-8").removesuffix("\n")
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                "public_prefixes", f"cannot read {self.file}: {error}", "give a readable file"
            ) from None
        if not text:
            raise ConfigError("public_prefixes", f"{self.file} is empty", "remove it, or write the text")
        return text


class PrivacyOptions(Options):
    """What of prompts is public, and what never is (docs/decisions/0058-marks.md)."""

    public_prefixes: tuple[PublicPrefix, ...] = Field(
        (),
        max_length=256,
        description="system prompts that all tenants share from the first request on, for example "
        "{file: assistant.txt}",
    )
    private_prompt_hook: str = Field(
        "",
        description="module:function that is asked of each prompt from which page on it is private for ever; "
        "empty: nobody is asked",
    )
    private_prompt_hook_s: float = Field(
        0.1, gt=0, le=60, description="for its answer; without one the whole prompt is private"
    )


class AdminOptions(Options):
    """The second listener, for /metrics, /debug and /admin (docs/doors.md)."""

    admin_host: str = Field(LOOPBACK, description="where it listens; elsewhere than on loopback it has a key")
    # Not 9100 and 9101: Prometheus's node exporter, and HAProxy's metrics under Ray Serve.
    admin_ports: PortText = Field(
        "9110-9199", description="the first free port of this range; 0: any free port"
    )
    admin_key_file: Path | None = Field(
        None, description="its key; several lines: several keys; null: BATON_ADMIN_KEY, or no key"
    )
    metrics_tenants: int = Field(
        MOST_LABELS, ge=0,
        description="tenants that metrics tell apart: those with a weight first, then who comes first; all "
        "others are `other`, and requests without a tenant `anonymous`",
    )  # fmt: skip
    tenant_generations: Path | None = Field(
        None,
        description="file that keeps which tenants were forgotten, for when all processes have ended; null: "
        "none (docs/decisions/0059-forgetting.md)",
    )
    metrics_compat: MetricsCompat | None = Field(
        None, description="vllm: /metrics has the figures under vLLM's names, too, for its dashboards"
    )

    @property
    def admin_port_range(self) -> range:
        """The ports to try, in order."""
        return Ports(self.admin_ports, "admin_ports").choice


class LogOptions(Options):
    """A line of JSON for each request (docs/traces.md)."""

    request_log: Path | None = Field(
        None, description='file that gets a line of JSON for each request; "-": stdout; null: none'
    )
    request_log_prompts: bool = Field(False, description="the lines have the prompts' texts, too")


class RouterSettings(
    KeyOptions,
    PrivacyOptions,
    PlacementOptions,
    AdmissionOptions,
    RoomOptions,
    ResumeOptions,
    HttpOptions,
    ResponseOptions,
    EmbeddingOptions,
    AdminOptions,
    LeaseOptions,
    LogOptions,
):
    """Router options."""


class ConnectionOptions(Options):
    """Connections to a listener of the router itself. Behind Serve, Serve's own options apply."""

    max_connections: int = Field(
        8192, ge=1, description="of a process at once, or as many as it has descriptors for; beyond: 503"
    )
    max_header_bytes: int = Field(
        65_536, ge=1024, description="of a request line and its headers; beyond: 431"
    )
    header_timeout_s: float = Field(
        10.0, gt=0, description="for a connection to send the head of a request; then 408"
    )
    tls_cert: Path | None = Field(
        None, description="certificate and what leads to its authority, in PEM; null: no TLS"
    )
    tls_key: Path | None = Field(None, description="its key, in PEM, without a password")

    @model_validator(mode="after")
    def _certificate_and_key(self) -> ConnectionOptions:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key are given together")
        return self


class OutputOptions(Options):
    """What is read in a model's output (docs/tools.md)."""

    tool_call_parser: str = Field(
        "auto",
        description="how the model writes calls of functions: auto, by its chat template; none; or a name of "
        "vLLM's or SGLang's, such as hermes",
    )
    reasoning_parser: str = Field(
        "auto", description="how the model writes its reasoning: auto, none, or a name, such as qwen3"
    )
    chat_template: str | None = Field(
        None, min_length=1, description="file with a chat template, or its text; null: the model's own"
    )


class RoutedModel(OutputOptions):
    """A model that a router serves: its text side, and how its versions share new streams."""

    model: Path = Field(
        description="directory with tokenizer.json (or Kimi's tiktoken.model), tokenizer_config.json, "
        "chat_template.jinja"
    )
    served_model_name: str = Field(min_length=1)
    generation_config: str = Field(
        "auto", min_length=1,
        description="where requests get what they leave out: auto, the model's generation_config.json; vllm, "
        "neutral values; or a folder with such a file",
    )  # fmt: skip
    version_weights: VersionWeights = Field(
        {}, description="share of new streams by model_version; {}: by decode capacity (docs/routing.md)"
    )


class RouterOptions(RouterSettings, ConnectionOptions, OutputOptions, SocketOptions):
    """Options of one router process. `host`, `port` and the options of connections are for a router without
    Serve in front. One model is named by `model` and `served_model_name`, several by `models`."""

    model: Path | None = Field(None, description=RoutedModel.model_fields["model"].description)
    served_model_name: str | None = Field(None, min_length=1)
    generation_config: str = Field(
        "auto", min_length=1, description=RoutedModel.model_fields["generation_config"].description
    )
    version_weights: VersionWeights = Field(
        {}, description=RoutedModel.model_fields["version_weights"].description
    )
    models: tuple[RoutedModel, ...] = Field(
        (), description="several models behind one router, instead of `model` and `served_model_name`"
    )
    host: str = LOOPBACK
    port: int = Field(HTTP_PORT, ge=0, le=65535, description="0: any free port")
    directory: str | None = Field(None, description="the directory's mailbox; null: this router hosts it")

    @model_validator(mode="after")
    def _one_form(self) -> RouterOptions:
        one = [self.model, self.served_model_name]
        if self.models:
            if one != [None, None] or self.version_weights:
                raise ValueError("give either models, or model, served_model_name and version_weights")
            names = [model.served_model_name for model in self.models]
            if len(set(names)) < len(names):
                raise ValueError("two of the models have one served_model_name")
        elif None in one:
            raise ValueError("give model and served_model_name, or models")
        return self

    @property
    def served(self) -> tuple[RoutedModel, ...]:
        """The models, in either form."""
        if self.models:
            return self.models
        assert self.model is not None
        assert self.served_model_name is not None
        return (
            RoutedModel(
                model=self.model,
                served_model_name=self.served_model_name,
                generation_config=self.generation_config,
                tool_call_parser=self.tool_call_parser,
                reasoning_parser=self.reasoning_parser,
                chat_template=self.chat_template,
                version_weights=self.version_weights,
            ),
        )

    def tenant_labels(self) -> TenantLabels:
        """What metrics call tenants."""
        return TenantLabels(self.tenant_weights, self.metrics_tenants)

    def shared_resume_key(self) -> str | None:
        """The key of event ids for routers that are started together: drawn here, unless it is given. None:
        each derives it from the cluster's secret."""
        if self.resume_key is not None or self.secret() is not None:
            return self.resume_key
        return secrets.token_hex(16)
