"""Plugins, the optional parts of the server: each is a folder, whose module `plugin` the server imports if the folder
is there.

`edge_server.plugin` says what a plugin may bring. The core never imports from here; a plugin may import the core, and
another plugin only where tests/test_architecture.py lists it with a reason.
"""
