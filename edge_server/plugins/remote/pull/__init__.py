"""Downloads of models, with their SHA-256 verified: `edge-server pull`, and the copies of models in OCI registries.

`model_installation.py` puts a model into a repository, complete or not at all. Its files come from a web server by
`resumable_download.py` and `archive.py`, or from an OCI registry by `oci_registry.py` (with `docker_credentials.py`)
and `oci_model.py`.
"""
