"""Load generator and measurements for a running server over HTTP and gRPC, and the search for the best
configuration."""
