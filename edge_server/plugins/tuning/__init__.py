"""Measurement and tuning of models: `load` measures a running server, `trial` tries runtimes and precisions in child
processes. Used by the commands `perf`, `analyze` and `optimize`."""
