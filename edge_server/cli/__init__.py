"""Command line: one file per command, each a function from arguments to an exit code.

Sits on top of everything: `serve` and `check` build a server, `status` talks to a running one over the wire only.
Exit codes: 0 done, 1 something failed while running, 2 it could not start as asked (flags, ports, repository).
"""
