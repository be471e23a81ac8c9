"""Language models: token engines with in-flight batching, and the session that serves text with them.

`backend` is the entry. `session` turns requests into token sequences and tokens into text, over any `TokenEngine`.
OpenVINO GenAI runs in a child process, because a step of it holds the GIL; ONNX Runtime GenAI runs in the server's.
`scripted_engine` needs no library. `openvino_embeddings` is a backend of its own, for models that give vectors.
"""
