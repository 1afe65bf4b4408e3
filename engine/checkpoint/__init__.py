"""Reads the tensors of a checkpoint, quantised or not, one at a time."""
