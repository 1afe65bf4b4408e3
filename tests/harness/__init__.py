"""Whole Batons on one machine, for tests, benches and tools: processes, stacks, leftovers."""
