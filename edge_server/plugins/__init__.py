"""Parts of the server that the core does not know by name: one folder each, with a module `plugin` at its entry.

`edge_server.plugin` says what a plugin may bring. The core never imports from here; a plugin may import the core, and
another plugin only where tests/test_architecture.py lists it with a reason.
"""
