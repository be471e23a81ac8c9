"""Remote model repositories (object stores and others that fsspec reads), kept as a copy on the local disk.

`address` parses s3://, gs://, as:// and file://. `object_store` lists and reads (the only file that uses fsspec).
`grouped_listing` finds the models and versions of a listing. `local_copy` owns the copy, and `sync` updates it on its
own thread. The copy is an ordinary repository for the scanner.

A version appears in the copy completely and in one step, and is replaced in the same way. A file is deleted only if two
listings in a row lack it, both are not empty, and everything new has arrived. While the store cannot be reached, the
copy is served.
"""
