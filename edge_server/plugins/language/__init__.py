"""Language models: backends that generate text, the HTTP APIs of OpenAI, Anthropic and ollama for them, and the
command `chat`.

`backend` opens the models. `text` turns requests into token sequences and tokens into text, over any `TokenEngine` of
`engines`. `routes` has the paths of the HTTP APIs, for these and other models with text tensors: `openai` makes
inference requests of calls and runs them, the other APIs translate their calls to its.
The libraries run in child processes, because OpenVINO GenAI holds the GIL in each step. `embeddings` has
backends of their own, for models that give vectors, and that score pairs of texts.
"""
