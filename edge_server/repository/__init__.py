"""From files on disk to the complete wish: which models and versions there are, and what each one promises.

`scan` states what the repositories hold, `source` turns that into wishes, `resolve` turns one version's files into a
ModelSpec that a backend can open. A version enters here as a directory and leaves as (ModelSpec, ModelFile). The
composition root may import this package; it asks `backends` about model files and speaks config.pbtxt by `protocol`.

A configuration's way: pbtxt (text to message), validate (what was written), choice (which runtime, which file),
autocomplete (what the file says), normalise (defaults), validate (the whole), to_spec (message to ModelSpec).
"""
