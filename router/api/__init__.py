"""HTTP: the OpenAI API, /generate, debug pages."""
