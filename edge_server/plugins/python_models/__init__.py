"""Backend `python`: models written in Python with Triton's interface, a `model.py` with a class TritonPythonModel.

`backend` opens the models. `session` runs a model in this process, or in a child process of `backends.isolation`.
Models import the module `triton_python_backend_utils`; the backend puts it into `sys.modules` when it is created. May
import core, errors and `backends`.
"""
