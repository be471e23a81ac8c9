"""Ensembles: a version made of the versions of other models, and the requests that go through its steps."""
