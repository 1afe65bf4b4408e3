"""The memory: pools, allocators, the radix tree, tiers, the event observer."""
