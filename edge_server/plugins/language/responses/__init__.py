"""OpenAI's API `responses` for language models: translation of its requests to chats, its answers, and their store."""
