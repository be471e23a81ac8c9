"""Measure models and choose their configuration: `load` measures a running server, `trial` tries runtimes and
precisions
in processes of their own. Used by the commands `perf`, `analyze` and `optimize`."""
