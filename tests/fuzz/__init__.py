"""Hostile input on every door of a running Baton (`make fuzz`)."""
