"""HTTP/2 server over sockets (RFC 9113, RFC 7541): frames, header compression, flow control, connections and TLS.

It knows nothing of gRPC: `server` accepts connections and calls its owner for each new stream; the owner's receiver
takes what the client sends on it, and answers by the methods of the stream. Imported by `frontends/grpc` alone.
"""
