"""Backend `c_abi`: runs models that are shared libraries, written against edge_backend.h in this folder."""
