"""HTTP: the OpenAI API, /generate, debug pages; errors become HTTP here."""
