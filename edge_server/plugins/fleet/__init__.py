"""Many boxes: what each says of itself, signed releases that they fetch themselves, and downloads of models.

`reports` is what a box says of itself, over HTTP or MQTT (`fleet status`). `pull` downloads a model from a web server
or a registry (`pull`). `publish` signs releases and leads them through their waves (`publish`, `fleet rollout`, `fleet
keys`); `release.py` says what a release is. `follow` runs on a box: it fetches, tries and installs the releases that
concern the box (`follow`, `serve --follow`). `page` shows all boxes in a browser (`fleet page`). `command.py` has the
subcommands of `fleet`.
"""
