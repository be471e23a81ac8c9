"""Measurement and tuning of models: `load` measures a running server, `trial` tries runtimes and precisions in child
processes. `perf`, `analyze` and `optimize` are the commands. They talk to a server over the wire."""
