"""The front: OpenAI API, the global KV index, the choice of P and D, the streams. Never torch."""
