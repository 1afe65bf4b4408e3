"""Attention backends (engine/paged_layers.py: AttentionBackend, LatentBackend)."""
