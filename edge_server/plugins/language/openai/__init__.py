"""OpenAI's API for language models: JSON of chats and completions to and from requests and responses. Knows no wire."""
