"""Attention backends (engine/attention.py: AttentionBackend)."""
