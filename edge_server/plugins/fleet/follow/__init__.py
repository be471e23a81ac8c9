"""The box's side of signed releases: `edge-server follow`, and `serve --follow`.

`signed_repository.py` reads a repository of TUF, over `site_files.py`. `follower.py` is one round of a box, over
`installed_models.py` (the disk) and `trial.py` (a run beside the serving version); `rounds.py` repeats it.
`command.py` runs them alone, `running.py` in a server.
"""
