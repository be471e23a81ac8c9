"""Signals of processes that are forked from one which handles them."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, signal
from edge_server.forked_signals import reset_in_forked_children

def ours(number, frame): pass
def anothers(number, frame): pass

for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, ours)
reset_in_forked_children((signal.SIGTERM, signal.SIGINT))
signal.signal(signal.SIGINT, anothers)
child = os.fork()
found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
if child:
    assert found == {signal.SIGTERM: ours, signal.SIGINT: anothers} and not mask
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    assert found == {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: anothers} and not mask
    os.kill(os.getpid(), signal.SIGTERM)
"""


def test_a_forked_child_has_the_default_effect_but_for_handlers_that_were_set_later() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "-15\n", "")
