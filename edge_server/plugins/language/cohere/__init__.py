"""Cohere's API for embeddings. Its reranking is in `openai`, because other APIs have the same."""
