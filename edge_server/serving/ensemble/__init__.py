"""Ensembles: models whose steps run on other models of the server.

A request enters at `EnsembleVersion.submit`; `ensemble_request` runs its steps by submitting requests to the members.
The version is opened by `lifecycle/loader`, like any other. Only `serving` imports from here."""
