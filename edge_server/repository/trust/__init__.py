"""Whether a version's files are what somebody said they are: checked before a runtime, or the parser, opens them.

A `SHA256SUMS` (the format of sha256sum) in a version's directory covers that directory; one in the model's directory
covers what lies outside the version directories: config.pbtxt, labels, warm-up data. Where one is present it is
verified, so that a corrupt upload is caught. `--require-checksums` refuses a version without one, and any file that is
not listed. `--signature-public-key` also wants an Ed25519 signature beside each, `SHA256SUMS.sig`, made for this model
and version: who may write to the repository but does not hold the key cannot have anything served.

What this does not protect from:
- Who holds old signed files may put them back: a signature says who made a version, not that it is the newest. Never
  use a version number twice, name the versions in a signed config.pbtxt (`version_policy { specific ... }`), or change
  the key. Deleting versions, or everything, needs no key either.
- The files are hashed, then opened by name. Sizes, times and inodes are compared again after they were opened, so a
  swap is noticed; one by who can write the disk's blocks, set its clock or replace this program is not.
- Hidden files and `__pycache__` are not looked at, here as in scanning.
"""
