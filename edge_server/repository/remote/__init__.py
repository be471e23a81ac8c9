"""Repositories in object stores and other places that fsspec reads, kept as a copy on the local disk.

`address` reads s3://, gs://, as:// and file://, `store` lists and reads there (the only file that knows fsspec),
`plan` says which models and versions a listing holds, `cache` owns the copy, `mirror` keeps it in step on a thread of
its own. The copy is a repository like any other: the scanner looks at it, and nothing that serves knows of the rest.

What a version is made from appears in the copy whole and at once, or not at all; so does what replaces it. Nothing is
deleted unless two listings in a row, neither of them empty, lack it and everything new has arrived. While the store is
out of reach the copy is what is served.
"""
