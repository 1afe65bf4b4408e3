"""The CPU backend: attention in C++, packed weights and fused layers."""
