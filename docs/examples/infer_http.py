"""Classify a picture over HTTP: python infer_http.py PICTURE [HOST:PORT]."""

import json
import sys
import urllib.request
from pathlib import Path

if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
    sys.exit("usage: python infer_http.py PICTURE [HOST:PORT]")
picture = Path(sys.argv[1]).read_bytes()
address = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8000"
request = urllib.request.Request(
    f"http://{address}/v2/models/efficientnet_lite0/infer", picture, {"Content-Type": "image/jpeg"}
)
with urllib.request.urlopen(request) as answer:
    for entry in json.load(answer)["outputs"][0]["data"]:
        score, _, label = entry.split(":")
        print(f"{float(score):.3f} {label}")
