"""Moves pages between processes and hosts: buffers and bytes, no model."""
