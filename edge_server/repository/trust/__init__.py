"""Checksums and signatures of model files: written by `edge-server sign`, and checked before anything opens a file.

A `SHA256SUMS` (the format of sha256sum) in a version's directory covers that directory; one in the model's directory
covers the files outside the version directories: config.pbtxt, labels, warm-up data. If one is present it is
verified, so that a corrupt upload is detected. `--require-checksums` rejects a version without one, and any file that
is not listed. `--signature-public-key` also requires an Ed25519 signature, `SHA256SUMS.sig`, beside each list, made for
this model and version. A user who can write to the repository but does not have the key cannot get a file served.

Not covered:
- Old signed files can be put back: a signature proves who made a version, not that it is the newest one. Never
  use a version number twice, name the versions in a signed config.pbtxt (`version_policy { specific ... }`), or change
  the key. Deleting versions, or everything, needs no key either.
- The files are hashed, then opened by name. Sizes, times and inodes are compared again after the opening, so a
  replaced file is detected. A user who can write disk blocks, set the clock or replace this program can avoid that.
- Hidden files and `__pycache__` are ignored, as in a scan.
"""
