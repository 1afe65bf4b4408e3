"""The CUDA backend: fused layers over FlashInfer's operators."""
