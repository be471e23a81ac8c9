"""Commands for several machines: one table of many running servers (`fleet status`), and the download of models
(`pull`).

`edge-server fleet status` asks the servers over HTTP; `edge-server pull` fetches a model and verifies it. No
server imports them.
"""
