"""ollama's HTTP API for language models: translation of its requests to those of OpenAI's API, and its responses."""
