"""Response cache: repeated requests are answered without running the model.

`recall` stands between a version and its scheduler: it looks a request up and stores what was computed. `cache` is the
server's one cache, `local` and `redis_store` are where it keeps answers; `key` says which requests are the same. Used
by `version`, `ensemble` and the loader; made by `choice` for the server.
"""
