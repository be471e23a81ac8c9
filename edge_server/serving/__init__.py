"""Serving of models: loads model versions, routes requests to them, and runs batches on their instances.

A request enters at `Router.submit`, goes to a version's `submit` and is answered through its ticket's sink. A version
enters as part of the desired state given to `ModelTable` and is closed after its last request was answered. Used by
`service` and `process`. Knows no event loop and no wire; opens runtimes only through `backends.open_session`.
"""
