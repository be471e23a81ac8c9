"""OpenAI's API for language models: its HTTP routes, and its JSON to requests and from responses."""
