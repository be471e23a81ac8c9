"""OpenAI's HTTP API for language models: routes, and conversion of its JSON to requests and from responses."""
