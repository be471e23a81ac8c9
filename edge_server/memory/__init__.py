"""Memory of the server: shared-memory regions that clients registered, checks of the available memory, and settings of
malloc.

May import core, errors, config and protocol. A front end pins a piece of a region for a request and unpins it at the
request's release. Model versions use only `malloc_settings`.
"""
