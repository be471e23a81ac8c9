"""Load generator and measurements of a running server over HTTP and gRPC; search for the best configuration."""
