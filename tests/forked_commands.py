"""Commands of the package, each in a process of its own, all forked from one that has imported the package: the imports
of a command take longer than what most tests let it do."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

FORKING = """
import gc, json, os, sys, warnings
from edge_server.cli.main import main
import edge_server.backends.builtin_models, edge_server.cli.check, edge_server.cli.status
import edge_server.process.composition_root
gc.freeze()  # else each process visits all objects at its end, and so copies the memory of this one

for line in sys.stdin:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads of imported libraries
        child = os.fork()
    if not child:
        given = json.loads(line)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, given["stdout"]), (2, given["stderr"])):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.exit(main(given["arguments"]))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkedCommands:
    """`commands(*arguments)` runs `edge-server` with them and returns its exit code, output and errors.

    The package is found with `folder` first on the path. `prologue`: what is run before it is imported.
    """

    def __init__(self, folder: Path, outputs: Path, prologue: str = "") -> None:
        self._outputs = (outputs / f"output{number}" for number in itertools.count())
        self._process = subprocess.Popen(
            [sys.executable, "-c", prologue + FORKING], env={**os.environ, "PYTHONPATH": str(folder)}, cwd=folder,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> ForkedCommands:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=30)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        stdout = next(self._outputs)
        stderr = stdout.with_suffix(".err")
        given = {"arguments": arguments, "stdout": str(stdout), "stderr": str(stderr)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        code = int(self._process.stdout.readline())
        return subprocess.CompletedProcess(arguments, code, stdout.read_text(), stderr.read_text())
