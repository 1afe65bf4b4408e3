"""The CPU backend: our own attention, packed weights and fused layers."""
