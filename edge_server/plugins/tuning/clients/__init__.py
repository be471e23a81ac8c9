"""Clients of load tests: they describe models, encode requests, and send them over HTTP/1.1 and gRPC without blocking.

A client has a module for queries and requests (`http_client`), and one for its connections (`http_connection`). Used by
the folder `load`, which decides when a request is sent.
"""
