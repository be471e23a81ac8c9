"""Language models: backends that generate text, OpenAI's HTTP API for them, and the command `chat`.

`backend` opens the models. `text` turns requests into token sequences and tokens into text, over any `TokenEngine` of
`engines`. `openai` has the routes of OpenAI's API, for these and other models with text tensors.
The libraries run in child processes, because they hold the GIL: OpenVINO GenAI in each step, ONNX Runtime GenAI while
it loads a model. `scripted_engine` needs no library. `openvino_embeddings` is a backend of its own, for models that
give vectors.
"""
