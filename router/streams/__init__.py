"""Rooms and their messages: every message idempotent, every failure a new epoch."""
