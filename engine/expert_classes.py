"""The transformers classes of experts that CPU and CUDA compute themselves."""

from __future__ import annotations

CLAMPED = "GptOssExperts"
"""Its gates and ups alternate, have biases and are clamped."""
EXPERTS = (
    "AXK1Experts",
    "AfmoeExperts",
    "DeepseekV2Experts",
    "DeepseekV32Experts",
    "DeepseekV3Experts",
    "Dots1Experts",
    "Ernie4_5_MoeExperts",
    "ExaoneMoeExperts",
    "Gemma4TextExperts",
    "Glm4MoeExperts",
    "Glm4MoeLiteExperts",
    "GlmMoeDsaExperts",
    "GraniteMoeExperts",
    "GraniteMoeHybridExperts",
    "GraniteMoeSWAExperts",
    "GraniteMoeSharedExperts",
    "HYV3Experts",
    "Kolibri1Experts",
    "LagunaExperts",
    "Lfm2MoeExperts",
    "MellumExperts",
    "MiniMaxM2Experts",
    "Mistral4Experts",
    "MixtralExperts",
    "OlmoeExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "Qwen3NextExperts",
    "Qwen3_5MoeExperts",
    "SolarOpenExperts",
    CLAMPED,
)
