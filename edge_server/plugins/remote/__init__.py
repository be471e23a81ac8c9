"""Remote model repositories (object stores and others that fsspec reads, OCI registries), kept as a copy on the local
disk.

`address` parses s3://, gs://, as:// and file://. `object_store` lists and reads (the only file that uses fsspec).
`grouped_listing` finds the models and versions of a listing. `local_copy` owns the copy, and `sync` updates it on its
own thread. The copy is an ordinary repository for the scanner. `repositories` has the copies of one server.
`artifact_sync` is all of that for oci://, by what the command `pull` (folder `pull`) uses.

A version is added to the copy, or replaced, as a whole and in one step. A file is deleted only if two consecutive
listings do not contain it, neither listing is empty, and all new files have been downloaded. While the store cannot be
reached, the copy is served.
"""
