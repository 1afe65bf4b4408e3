"""The transformers classes of experts that CPU and CUDA compute themselves."""

from __future__ import annotations

CLAMPED = "GptOssExperts"
"""Its gates and ups alternate, have biases and are clamped."""
EXPERTS = (
    "AfmoeExperts",
    "Dots1Experts",
    "ExaoneMoeExperts",
    "HYV3Experts",
    "Mistral4Experts",
    "SolarOpenExperts",
    "MixtralExperts",
    "MiniMaxM2Experts",
    "Ernie4_5_MoeExperts",
    "Gemma4TextExperts",
    "Glm4MoeExperts",
    "GraniteMoeHybridExperts",
    "Glm4MoeLiteExperts",
    "Lfm2MoeExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "Qwen3NextExperts",
    "Qwen3_5MoeExperts",
    "DeepseekV2Experts",
    "DeepseekV3Experts",
    "DeepseekV32Experts",
    "GlmMoeDsaExperts",
    CLAMPED,
)
