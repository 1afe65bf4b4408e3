"""What is measured of requests, as their clients see them, by model."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from common.errors import BatonError, Overloaded
from common.tenant_labels import TenantLabels
from router.measures import Count, Distribution

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576)
_CHOICES = (1, 2, 4, 8, 16, 32, 64, 128)


class RequestMetrics:
    """Updated per request, and `itl` whenever a choice gets tokens."""

    def __init__(
        self, registry: CollectorRegistry, models: Iterable[str] = (), tenants: TenantLabels | None = None
    ) -> None:
        """Histograms of `models` are there before the first request: Prometheus cannot tell how much a series
        has grown that it has not seen before. `tenants` may be shared with other metrics."""
        self.requests = Count(registry, "baton_router_requests", "Requests by HTTP status", "status")
        self._rejects = Count(
            registry, "baton_router_rejects", "Requests that were answered with an error, by cause", "cause"
        )
        self.aborts = Count(registry, "baton_router_aborts", "Requests ended by their client")
        self.resumes = Count(
            registry, "baton_router_resumes", "Streams resumed, by what became of their rooms", "rooms"
        )
        self.finished = Count(
            registry, "baton_router_finished_choices",
            "Choices that came to their end: stop, length, abort (by the client), error, interrupted",
            "model", "reason",
        )  # fmt: skip
        self.prompt_tokens = Count(registry, "baton_router_prompt_tokens", "Prompt tokens", "model")
        self.cached_tokens = Count(
            registry, "baton_router_cached_tokens", "Prompt tokens that were not computed", "model"
        )
        self.output_tokens = Count(registry, "baton_router_output_tokens", "Output tokens", "model")
        self._tenants = tenants or TenantLabels()
        self._tenant_requests = Count(
            registry, "baton_router_tenant_requests", "Requests that came to their end, by tenant", "tenant"
        )
        self._tenant_prompt_tokens = Count(
            registry, "baton_router_tenant_prompt_tokens", "Prompt tokens, by tenant", "tenant"
        )
        self._tenant_cached_tokens = Count(
            registry, "baton_router_tenant_cached_tokens", "Prompt tokens that were not computed, by tenant",
            "tenant",
        )  # fmt: skip

        def by_model(name: str, about: str, bounds: tuple[float, ...]) -> Distribution:
            distribution = Distribution(registry, f"baton_router_{name}", about, bounds, "model")
            for model in models:
                distribution.at(model)
            return distribution

        self.ttft = by_model("ttft_seconds", "Arrival to first token", SECONDS)
        self.itl = by_model("itl_seconds", "Between a choice's tokens, as they come from workers", SECONDS)
        self.tpot = by_model(
            "tpot_seconds", "Mean time between a request's tokens, from the first to the last", SECONDS
        )
        self.latency = by_model("request_seconds", "Arrival to last token", SECONDS)
        self.decode = by_model("decode_seconds", "First to last token", SECONDS)
        self.prompt_length = by_model("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self.output_length = by_model("request_output_tokens", "Output tokens of a request", _TOKENS)
        self.longest_output = by_model(
            "request_longest_output_tokens", "Output tokens of a request's longest choice", _TOKENS
        )
        self.choices = by_model("request_choices", "Choices for each prompt of a request", _CHOICES)
        self.max_tokens = by_model(
            "request_max_tokens", "Most output tokens of a choice, as asked for", _TOKENS
        )

    def ended(self, tenant: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A tenant's request has come to its end."""
        label = self._tenants.of(tenant)
        self._tenant_requests.inc(1, label)
        self._tenant_prompt_tokens.inc(prompt_tokens, label)
        self._tenant_cached_tokens.inc(cached_tokens, label)

    def rejected(self, error: BatonError) -> None:
        """A request was answered with an error."""
        self._rejects.inc(1, cause_of(error))


def cause_of(error: BatonError) -> str:
    """The error's name in the label `cause`, such as "invalid_request" or "overloaded_queue"."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    return f"{name}_{error.cause}" if isinstance(error, Overloaded) else name
