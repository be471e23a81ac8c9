"""Calls of the CUDA driver: GPU memory, streams, graphs and copies, for backends and for the server itself, in the CUDA
contexts that all libraries of the process share.

`cuda_driver` chooses how the driver is called: `cuda_pycuda` or `cuda_ctypes`. `cuda_devices` maps GPU memory of
clients, copies it, and tells free memory and UUIDs. None of them loads the driver when it is imported.
"""
