"""Clients of a server with OpenAI's API, Baton's or another: `baton bench` and `baton chat`."""
