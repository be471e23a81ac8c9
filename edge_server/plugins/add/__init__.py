"""Plugin `add`: the command that puts a model file into a repository, with a commented configuration, and tries it."""
