"""Several machines: one table of many running servers, and models that machines download.

`edge-server fleet status` asks the servers over HTTP; `edge-server pull` fetches a model and verifies it. No
server imports them.
"""
