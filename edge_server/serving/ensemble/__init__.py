"""Ensembles: a version made of the versions of other models, and one request on its way through the steps."""
