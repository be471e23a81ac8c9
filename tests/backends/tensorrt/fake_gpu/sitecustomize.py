"""Read by Python at its start when this folder is on PYTHONPATH: gives a process, and its children, a GPU that is not
there. FAKE_CUDA_LIBRARY is the compiled driver."""

import os
import sys

if os.environ.get("FAKE_CUDA_LIBRARY") and not any("pip" in word for word in sys.argv[:1]):
    import runtime_double
    import tensorrt_rtx

    from edge_server.backends.tensorrt import cuda_driver

    # cuda-python, where it is installed, looks for a driver of the system's.
    cuda_driver._WAYS = ()
    cuda_driver.LIBRARY = os.environ["FAKE_CUDA_LIBRARY"]
    runtime_double.install(tensorrt_rtx, cuda_driver.LIBRARY)
