"""Response cache: answers repeated requests without running the model.

`lookup` looks a request up for one version and stores its answer; `scheduler_adapter` connects it to the scheduler.
`response_cache` is the server's one cache. `local_store` and `redis_store` keep the answers. `request_key` decides
which requests are equal. Imported by `serving` and `process`.
"""
