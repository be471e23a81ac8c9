"""Reports: what each box says of itself, and `edge-server fleet status`, which shows it for many boxes.

`box_report.py` has the form of a report. A box that follows can keep its report at a broker of MQTT
(`report_publisher.py`). Commands read reports by `box_options.py`: from servers (`http_boxes.py`)
or from a broker (`mqtt_boxes.py`). `served_versions.py` finds boxes that differ from most.
"""
