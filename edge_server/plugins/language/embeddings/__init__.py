"""Backends of models that give vectors of texts, or that score pairs of texts. `backends` loads them by the names in
`plugin`. May import `engines.model_size` and `engines.settings`."""
