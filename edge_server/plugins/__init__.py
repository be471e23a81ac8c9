"""Plugins, the optional parts of the server: one folder each, which the core does not import by name, with a module
`plugin` as its entry.

`edge_server.plugin` says what a plugin may bring. The core never imports from here; a plugin may import the core, and
another plugin only where tests/test_architecture.py lists it with a reason.
"""
