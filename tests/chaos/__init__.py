"""Faults, injected into a running Baton from outside, and what it must do then (docs/reliability.md)."""
