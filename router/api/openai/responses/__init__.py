"""OpenAI's Responses API: request models, the items of a conversation, answers, streams."""
