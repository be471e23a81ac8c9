"""Lifecycle of models: their states, loading and unloading, and the routing of requests.

A version enters as a new desired state in `model_table`. `reconciler` has it loaded and warmed up, then `router` sends
requests to it. It is closed after its last request was answered.
"""
