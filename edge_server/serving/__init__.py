"""Model serving: loads model versions, routes requests to them, and runs batches on their instances.

A request enters at `Router.submit`, goes to a version's `submit` and leaves through its ticket's sink; a version
enters as a wish given to `Manager` and leaves when its last request is answered. Used by `service` and `server`. Knows
no event loop and no wire; opens runtimes only through `backends.load_backend`.
"""
