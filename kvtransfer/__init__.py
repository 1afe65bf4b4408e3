"""Moves pages between processes and hosts. Knows buffers and bytes; knows no model."""
