"""vLLM's additions to OpenAI's HTTP API: `tokenize` and `detokenize`."""
