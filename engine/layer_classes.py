"""The transformers classes of layers that CPU and CUDA compute themselves."""

from __future__ import annotations

import math

from torch.nn import functional

CLAMPED = "GptOssExperts"
"""Its gates and ups alternate, have biases and are clamped."""
EXPERTS = (
    "AXK1Experts",
    "AXK2Experts",
    "AfmoeExperts",
    "BailingHybridExperts",
    "Cohere2MoeExperts",
    "DeepseekV2Experts",
    "DeepseekV32Experts",
    "DeepseekV3Experts",
    "DeepseekV4Experts",
    "Dots1Experts",
    "Ernie4_5_MoeExperts",
    "ExaoneMoeExperts",
    "FlexOlmoExperts",
    "Gemma4TextExperts",
    "Glm4MoeExperts",
    "Glm4MoeLiteExperts",
    "Glm5NextTextExperts",
    "GlmMoeDsaExperts",
    "GraniteMoeExperts",
    "GraniteMoeHybridExperts",
    "GraniteMoeSWAExperts",
    "GraniteMoeSharedExperts",
    "HYV3Experts",
    "HYV4Experts",
    "HunYuanMoEV1Experts",
    "KimiLinearExperts",
    "Kolibri1Experts",
    "LagunaExperts",
    "Llama4Experts",
    "Llama4TextExperts",
    "Lfm2MoeExperts",
    "MellumExperts",
    "MiMoV2FlashExperts",
    "MiniMaxM2Experts",
    "MiniMaxM3VLExperts",
    "Mistral4Experts",
    "MistralLarge4TextExperts",
    "MixtralExperts",
    "OlmoeExperts",
    "Qwen2MoeExperts",
    "Qwen3MoeExperts",
    "Qwen3NextExperts",
    "Qwen3_5MoeExperts",
    "SolarOpenExperts",
    "Step3p7Experts",
    "StepExperts",
    CLAMPED,
)
"""Mixtures whose experts are down(act(gate(x)) * up(x)), held in one tensor each. DeepSeek-V4's, Hunyuan
4's and MiniMax-M3's have a limit: gates are at most that, and ups within it. MiniMax-M3's and gpt-oss's are
down(act(gate(x)) * (up(x) + 1)). Llama 4's become ours (engine/llama4.py: Llama4Experts) after they are
divided among ranks, and so do Step 3.7's (engine/step.py)."""

UNGATED_EXPERTS = ("NemotronHExperts",)
"""Mixtures whose experts are down(act(up(x))), held in one tensor each."""

ROUTERS = (
    "Cohere2MoeTopKRouter",
    "DeepseekV4HashRouter",
    "DeepseekV4TopKRouter",
    "FlexOlmoTopKRouter",
    "GptOssTopKRouter",
    "GraniteMoeHybridTopKRouter",
    "GraniteMoeSWATopKRouter",
    "GraniteMoeSharedTopKRouter",
    "GraniteMoeTopKRouter",
    "HunYuanMoEV1Gate",
    "LagunaTopKRouter",
    "Llama4Router",
    "Lfm2MoeTopKRouter",
    "MellumTopKRouter",
    "MiniMaxM2TopKRouter",
    "MiniMaxM3VLTopKRouter",
    "Mistral4TopkRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3NextTopKRouter",
    "Qwen3_5MoeTopKRouter",
    "Step3p7TopKRouter",
)
"""Routers that multiply with their weight in the model's dtype. Others do so in float32."""

NORMS = (
    "AXK1RMSNorm",
    "AXK2RMSNorm",
    "AfmoeRMSNorm",
    "ApertusRMSNorm",
    "ArceeRMSNorm",
    "BailingHybridRMSNorm",
    "BambaRMSNorm",
    "Cohere2MoeRMSNorm",
    "CwmRMSNorm",
    "DeepseekV2RMSNorm",
    "DeepseekV32RMSNorm",
    "DeepseekV3RMSNorm",
    "Dots1RMSNorm",
    "Ernie4_5RMSNorm",
    "Ernie4_5_MoeRMSNorm",
    "Exaone4RMSNorm",
    "ExaoneMoeRMSNorm",
    "FalconH1RMSNorm",
    "FlexOlmoRMSNorm",
    "Gemma3nRMSNorm",
    "Gemma4RMSNorm",
    "Gemma4UnifiedRMSNorm",
    "Glm4MoeLiteRMSNorm",
    "Glm4MoeRMSNorm",
    "Glm4RMSNorm",
    "Glm5NextTextRMSNorm",
    "GlmMoeDsaRMSNorm",
    "GlmRMSNorm",
    "GptOssRMSNorm",
    "GraniteMoeHybridRMSNorm",
    "GraniteMoeRMSNorm",
    "GraniteMoeSWARMSNorm",
    "GraniteMoeSharedRMSNorm",
    "GraniteRMSNorm",
    "GraniteSWARMSNorm",
    "HYV3RMSNorm",
    "HYV4RMSNorm",
    "HeliumRMSNorm",
    "HunYuanDenseV1RMSNorm",
    "HunYuanMoEV1RMSNorm",
    "HyperCLOVAXRMSNorm",
    "KimiLinearRMSNorm",
    "Kolibri1RMSNorm",
    "LagunaRMSNorm",
    "Llama4TextRMSNorm",
    "Lfm2MoeRMSNorm",
    "Lfm2RMSNorm",
    "Lfm3RMSNorm",
    "MellumRMSNorm",
    "MiMoV2FlashRMSNorm",
    "MiniCPM3RMSNorm",
    "MiniMaxM2RMSNorm",
    "Ministral3RMSNorm",
    "MinistralRMSNorm",
    "Mistral4RMSNorm",
    "MistralLarge4RMSNorm",
    "NemotronHRMSNorm",
    "Olmo2RMSNorm",
    "Olmo3RMSNorm",
    "OlmoHybridRMSNorm",
    "OlmoeRMSNorm",
    "Phi3RMSNorm",
    "SmolLM3RMSNorm",
    "SolarOpenRMSNorm",
    "YoutuRMSNorm",
)
"""transformers' norms that multiply by their weight. Some of Gemma 4's have none, and stay."""

NORMS_PLUS_ONE = (
    "Gemma2RMSNorm",
    "Gemma3RMSNorm",
    "GemmaRMSNorm",
    "MiniMaxM3VLRMSNorm",
    "Qwen3NextRMSNorm",
    "Qwen3_5MoeRMSNorm",
    "Qwen3_5RMSNorm",
    "Step3p7RMSNorm",
    "VaultGemmaRMSNorm",
)
"""transformers' norms that multiply by their weight plus one."""

MLPS = (
    "AXK1MLP",
    "AXK2MLP",
    "AfmoeMLP",
    "BambaMLP",
    "BailingHybridMLP",
    "Cohere2MLP",
    "Cohere2MoeMLP",
    "CwmMLP",
    "DeepseekV2MLP",
    "DeepseekV32MLP",
    "DeepseekV3MLP",
    "Dots1MLP",
    "Ernie4_5MLP",
    "Ernie4_5_MoeMLP",
    "Exaone4MLP",
    "ExaoneMoeMLP",
    "Gemma2MLP",
    "Gemma3MLP",
    "Gemma4TextMLP",
    "Gemma4UnifiedTextMLP",
    "GemmaMLP",
    "Glm4MoeLiteMLP",
    "Glm4MoeMLP",
    "GlmMoeDsaMLP",
    "GraniteMLP",
    "GraniteSWAMLP",
    "HYV3MLP",
    "HYV4MLP",
    "HeliumMLP",
    "HunYuanDenseV1MLP",
    "HunYuanMoEV1MLP",
    "HyperCLOVAXMLP",
    "KimiLinearMLP",
    "Kolibri1MLP",
    "LagunaMLP",
    "Llama4TextMLP",
    "MellumMLP",
    "MiMoV2FlashMLP",
    "MiniCPM3MLP",
    "Ministral3MLP",
    "Mistral4MLP",
    "MistralLarge4TextMLP",
    "Olmo2MLP",
    "Olmo3MLP",
    "OlmoHybridMLP",
    "Qwen2MoeMLP",
    "Qwen3NextMLP",
    "Qwen3_5MLP",
    "Qwen3_5MoeMLP",
    "SmolLM3MLP",
    "SolarOpenMLP",
    "VaultGemmaMLP",
    "YoutuMLP",
)
"""transformers' modules down(act(gate(x)) * up(x)) without biases."""


def limit_of(experts: object) -> float:
    """Of a mixture's gates and ups; infinity: there is none."""
    limit: float = getattr(experts, "limit", getattr(experts, "swiglu_limit", math.inf))
    return limit


def clamps_first(experts: object) -> bool:
    """Whether gates are clamped before their activation, if at all; Step 3.7's are not."""
    return limit_of(experts) == math.inf or not getattr(experts, "clamps_after", False)


def sharpness_of(experts: object) -> float | None:
    """alpha of experts whose act(x) is x sigmoid(alpha x), and who add 1 to ups; None: they do not."""
    alpha: float | None = getattr(experts, "alpha", getattr(experts, "swiglu_alpha", None))
    return alpha


def activation_of(experts: object) -> object:
    """Of a mixture's gates. A class that names none has SiLU."""
    return getattr(experts, "act_fn", functional.silu)
