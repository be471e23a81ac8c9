"""Command line: one file per command, each with a function `run(arguments)` that returns an exit code.

`console` draws for all of them.

The top layer, which may import all others; plugins with commands import its helpers. `serve` and `check` build a
server; `status` and others query a running one over the network. Exit codes: 0 success, 1 failure while running, 2
cannot start (flags, ports, repository).
"""
