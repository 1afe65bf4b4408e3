"""Anthropic's Messages API: request models, messages, streams."""
