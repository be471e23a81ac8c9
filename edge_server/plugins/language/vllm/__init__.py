"""vLLM's additions to OpenAI's HTTP API: `tokenize`, `detokenize` and `classify`."""
