"""The publisher's side of signed releases: `edge-server publish`, `fleet keys` and `fleet rollout`.

`publisher.py` writes releases into a repository of TUF, over `repository_metadata.py` (who may sign what) and
`signing_keys.py`. `rollout.py` leads a release through its waves, by the reports of the boxes.
"""
