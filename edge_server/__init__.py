"""edge_server: a small inference server for robots and edge boxes that speaks Triton's language.

Importing this package pulls in no runtime, no web framework and no gRPC: each is imported where it is first needed.
"""

__version__ = "0.1.0"
