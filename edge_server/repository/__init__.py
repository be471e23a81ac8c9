"""Model repositories: read folders of models on disk, and decide which versions should serve.

`watch` reacts to changes of the folders, `scan` lists the models, `incomplete_copy_detection` leaves out files that are
still being copied, `load_call_files` writes the files sent with a load call, and `desired_state` makes the desired
state. `resolve_version` turns one version's files into a ModelSpec and a file that a backend can open. Imported by
`process` and by commands that read a repository.

Steps of one configuration: `pbtxt` (text to message), `validate_config` (the configuration as written),
`backend_choice` (runtime and file), `auto_complete` (inputs and outputs of the file), `config_defaults`,
`validate_config` (the complete configuration), `config_to_spec` (message to ModelSpec).
"""
