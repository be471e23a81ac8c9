"""Python backend, compatible with Triton's: a `model.py` with a class TritonPythonModel.

`backend` opens them: `session` runs one in this process, `isolated` in a process of its own, where `worker` runs the
same session. What models import as `triton_python_backend_utils` is the module of that name here; it is put into
`sys.modules` when the first Python model comes. May import core, errors and `backends.base`, `backends.runtime`.
"""
