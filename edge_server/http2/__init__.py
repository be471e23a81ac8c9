"""HTTP/2 frames (RFC 9113) and header blocks (RFC 7541): what the server, the client and the load generator share.

No sockets, no threads. Imported by `frontends`, `client` and plugins.
"""
