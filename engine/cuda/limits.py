"""What FlashInfer's kernels are compiled for: attention, norms and rotary embedding of 0.7."""

from __future__ import annotations

import torch

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256, 512)
