"""Tensor parallelism: a model divided into parts that several ranks compute together."""
