"""Many boxes: what each says of itself, and signed releases that they fetch themselves.

`reports` is what a box says of itself, over HTTP or MQTT (`fleet status`). `publish` signs releases and leads them
through their waves (`publish`, `fleet rollout`, `fleet keys`); `release.py` says what a release is. `follow` runs on a
box: it fetches, tries and installs the releases that concern the box (`follow`, `serve --follow`). `page` shows all
boxes in a browser (`fleet page`). `command.py` has the subcommands of `fleet`.
"""
