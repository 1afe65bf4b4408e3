"""Requests, their rooms, and the messages to workers. A failure of a worker starts a new epoch."""
