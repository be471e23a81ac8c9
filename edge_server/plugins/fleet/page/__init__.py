"""Web page of a fleet: `edge-server fleet page`, a process that asks many servers and shows them in a browser.

`command` begins here. `box_poller` asks the servers, `box_record` makes of a status report what the page shows,
`fleet_state` keeps the boxes and says what changed, `rollout_state` reads and leads the rollouts of a signed
repository, and `page_server` serves all that, the files of `files/`, and those of the dashboard that the page shares.
"""
