"""Access to the CUDA driver, for backends and for the server itself, in the primary contexts that runtimes share.

`cuda_driver` chooses how the driver is called: `cuda_pycuda` or `cuda_ctypes`. `cuda_devices` maps GPU memory of
clients, copies it, and tells free memory and UUIDs. None of them loads the driver when it is imported.
"""
