"""HTTP/2 server over sockets (RFC 9113, RFC 7541): frames, header compression, flow control, connections and TLS.

Independent of gRPC. `server` accepts connections and calls its owner for each new stream. The owner's receiver gets the
client's data, and responds through the stream's methods. Imported only by `frontends/grpc`.
"""
