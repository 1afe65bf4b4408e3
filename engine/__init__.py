"""Runs one forward pass of a Hugging Face decoder on a CPU or GPU, and samples tokens from its logits."""
