"""Loading and unloading of models: the manager holds each model's state, the reconciler moves it to the desired state.

A version enters as a new desired state in `manager`. `loader` opens it and warms it up. It is closed after its last
request was answered.
"""
