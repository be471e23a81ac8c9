"""Language models: token engines with in-flight batching, and the session that serves text with them.

`backend` is the entry. `session` turns requests into token sequences and tokens into text, over any `TokenEngine`.
The libraries run in child processes, because they hold the GIL: OpenVINO GenAI in each step, ONNX Runtime GenAI while
it loads a model.
`scripted_engine` needs no library. `openvino_embeddings` is a backend of its own, for models that give vectors.
"""
