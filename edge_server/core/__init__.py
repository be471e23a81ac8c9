"""Nouns and rules of serving: tensors, messages, model specifications, batching.

Standard library and numpy only: no I/O, no threads, no asyncio, no clock (time comes in as `now`). Everyone above may
import from here; this folder imports only `errors`. A request enters as `message.Request`, a version as
`model.ModelSpec`.
"""
