"""Backend for models written in Python with Triton's interface: a `model.py` with a class TritonPythonModel.

`backend` opens the models. `session` runs a model in this process. `isolated_session` runs it in a child process, where
`process_main` runs the same session. Models import the module `triton_python_backend_utils`; the backend puts it into
`sys.modules` when it is created. May import core, errors, `backends.base` and `backends.backend_helpers`.
"""
