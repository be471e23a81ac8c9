"""Measure models of a running server, and search for the configuration that serves one best: over the wire only.

Pure are `facts` (nouns), `inputs` (tensors to send), `windows` (figures of what was answered), `search` (which
configurations are tried and which one wins), `chart` and `picture`. `grpc_wire` and `http_wire` send requests that
were written once, `load` does so at a concurrency or at a rate, `measure` until the figures are steady, `trials` each
with a server of its own.
May import core, errors, client, protocol, and of repository the syntax of config.pbtxt. Used by the command line.
"""
