"""Anthropic's HTTP API for language models: translation of its messages to OpenAI's chats, and its responses."""
