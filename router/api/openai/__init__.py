"""The OpenAI API: request models, answers, streams."""
