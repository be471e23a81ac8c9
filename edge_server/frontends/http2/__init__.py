"""HTTP/2 server over sockets (RFC 9113): connections, flow control, shares of a thread, TLS.

Independent of gRPC; frames are in `edge_server.http2`. A connection has a reader, a writer and an account. `server`
accepts connections and calls its owner for each new stream. The owner's receiver gets the client's data, and responds
through the stream's methods. Imported only by `frontends/grpc`.
"""
