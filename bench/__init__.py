"""Benchmarks: every speed claim is a ratio one of these prints."""
