"""Fake GPU for a process and its children: Python imports this module at its start if this folder is on PYTHONPATH.
FAKE_CUDA_LIBRARY is the compiled driver."""

import os
import sys

if os.environ.get("FAKE_CUDA_LIBRARY") and not any("pip" in word for word in sys.argv[:1]):
    import runtime_double
    import tensorrt_rtx

    from edge_server.backends.cuda import cuda_driver

    # pycuda, if it is installed, loads the system's driver. A None in sys.modules makes its import fail.
    sys.modules["pycuda"] = None
    cuda_driver.LIBRARY = os.environ["FAKE_CUDA_LIBRARY"]
    runtime_double.install(tensorrt_rtx, cuda_driver.LIBRARY)
