"""Model repositories: read folders of models on disk, and decide which versions should serve.

`disk/` scans the folders and watches them, `model_config/` reads and completes a configuration, `choice/` chooses the
runtime, `trust/` checks signatures. `desired_state` makes the desired state of what `disk/` found. Imported by
`process` and by commands that read a repository.

`resolve_version` turns one version's files into a ModelSpec and a file that a backend can open, by `pbtxt` (text to
message), `validate_config` (the configuration as written), `backend_choice` (runtime and file), `auto_complete` (inputs
and outputs of the file), `config_defaults`, `validate_config` (the complete configuration), `config_to_spec` (message
to ModelSpec).
"""
