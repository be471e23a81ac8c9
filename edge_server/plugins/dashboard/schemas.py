"""JSON schemas of the responses of the dashboard's HTTP routes, for the OpenAPI document. Imported for its first reader
only."""

from __future__ import annotations

from edge_server.frontends.http.schemas import BYTES, TEXT, OperationSchema

PAGE = OperationSchema(response={"text/html": {"schema": TEXT}})
FILE = OperationSchema(response={"*/*": {"schema": BYTES}})
