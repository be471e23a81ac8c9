"""Signed desired state of many boxes: `edge-server publish` writes it as a TUF repository, a follower on each box
fetches what concerns the box, tries it, and puts it into the box's model repository.

`release.py` says what a release is and which one a box wants; `publisher.py` writes a repository, over
`repository_metadata.py` (who may sign what) and `signing_keys.py`; `signed_repository.py` reads one; `follower.py` is
one round of a box, over `installed_models.py` (the disk) and `trial.py` (a run beside the serving version).
"""
