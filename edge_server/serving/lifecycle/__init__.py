"""Loading and unloading of models: the manager holds each model's state, the reconciler moves it to the desired state.

A version enters by `manager` (a new desired state), is opened by `loader`, warmed up by `warmup`, and leaves when its
last
request is answered."""
