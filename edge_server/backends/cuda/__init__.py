"""Access to the CUDA driver, for backends and for the server itself. Runtimes share the primary contexts of GPUs with it.

`cuda_driver` chooses how the driver is called: `cuda_pycuda` or `cuda_ctypes`. `cuda_devices` maps GPU memory of
clients, copies it, and tells free memory and UUIDs. None of them loads the driver when it is imported.
"""
