"""Coverage-guided fuzzing of the readers of foreign bytes, by atheris (libFuzzer): see tests/fuzz/README.md.

python tests/fuzz                                  # each reader for a minute
python tests/fuzz http2 model_size --seconds 3600  # two readers for an hour each
python tests/fuzz model_size --input build/fuzz/model_size/findings/crash-...   # repeats a finding, without atheris
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from reader_list import READERS

_FOLDER = Path(__file__).parent
_INPUT_TIMEOUT_S = 25
_MAX_FINDINGS = 5
"""Findings of a reader after which it is not started again."""

_STOP_S = 60.0
"""Time that a reader gets beyond its own, to start and to end."""


@dataclass
class Result:
    inputs: int = 0
    coverage: int = 0
    seconds: float = 0.0
    findings: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python tests/fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"readers (default: all): {', '.join(READERS)}")
    parser.add_argument("--seconds", type=int, default=60, help="time for each reader (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers; 0: another one each time")
    parser.add_argument(
        "--work", type=Path, default=Path("build/fuzz"),
        help="folder that keeps what was found: inputs that reach new code, and findings (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--replay", action="store_true", help="only check the seeds and the corpus, without atheris")
    parser.add_argument("--input", type=Path, help="only check one input, without atheris")
    options = parser.parse_args()
    if unknown := set(options.names) - set(READERS):
        parser.error(f"unknown reader {', '.join(sorted(unknown))}; there are {', '.join(READERS)}")
    names = options.names or list(READERS)
    if options.input is not None:
        for name in names:
            importlib.import_module(f"readers.{name}").check(options.input.read_bytes())
        return 0
    if options.replay:
        for name in names:
            print(f"{name}: {_replay(name)} inputs pass", flush=True)
        return 0
    findings = 0
    print(f"{'reader':<20}{'inputs':>12}{'a second':>10}{'coverage':>10}{'findings':>10}", flush=True)
    for name in names:
        result = _fuzz(name, options.seconds, options.seed, options.work / name)
        rate = result.inputs / max(result.seconds, 1e-9)
        print(f"{name:<20}{result.inputs:>12}{rate:>10.0f}{result.coverage:>10}{result.findings:>10}", flush=True)
        findings += result.findings
        _add_to_totals(options.work / "totals.json", name, result)
    return 1 if findings else 0


def _replay(name: str) -> int:
    reader = importlib.import_module(f"readers.{name}")
    inputs = [*reader.seeds(), *(path.read_bytes() for path in sorted((_FOLDER / "corpus" / name).glob("*")))]
    for data in inputs:
        reader.check(data)
    return len(inputs)


def _fuzz(name: str, seconds: int, seed: int, work: Path) -> Result:
    """Run a reader in a process of its own, and again after each finding, until its time is over."""
    corpus, findings = work / "corpus", work / "findings"
    corpus.mkdir(parents=True, exist_ok=True)
    findings.mkdir(exist_ok=True)
    # In memory where there is such a folder: some readers write each input to a file.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        seeds = Path(folder) / "seeds"
        seeds.mkdir()
        for index, data in enumerate(importlib.import_module(f"readers.{name}").seeds()):
            (seeds / f"seed{index}").write_bytes(data)
        for path in (_FOLDER / "corpus" / name).glob("*"):
            shutil.copy(path, seeds)
        result = Result()
        end_s = time.monotonic() + seconds
        while (left_s := round(end_s - time.monotonic())) > 0 and result.findings < _MAX_FINDINGS:
            arguments = [
                f"-max_total_time={left_s}", f"-timeout={_INPUT_TIMEOUT_S}", "-print_final_stats=1",
                f"-artifact_prefix={findings.resolve()}/", f"-seed={seed}", "-rss_limit_mb=4096",
                str(corpus), str(seeds),
            ]  # fmt: skip
            command = [sys.executable, str(_FOLDER / "fuzz_reader.py"), name, *arguments]
            begun_s = time.monotonic()
            with (work / "log").open("w+", errors="replace") as log:
                code = subprocess.run(
                    command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TMPDIR": folder},
                    timeout=left_s + _STOP_S, check=False,
                ).returncode  # fmt: skip
                log.seek(0)
                text = log.read()
            result.seconds += time.monotonic() - begun_s
            result.inputs += _last_number(r"stat::number_of_executed_units: *(\d+)", text)
            result.coverage = max(result.coverage, _last_number(r" cov: (\d+)", text))
            if code:
                result.findings += 1
                _show_finding(name, text)
    return result


def _last_number(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _show_finding(name: str, text: str) -> None:
    """Print a process's report of its finding, and the command that repeats it.

    Raises RuntimeError if it ended without an input: then the reader itself is broken.
    """
    path = re.search(r"Test unit written to (\S+)", text)
    if path is None:
        raise RuntimeError(f"{name} ended without a finding: {text[-4000:]}")
    start = text.find("=== Uncaught Python exception")
    print(text[start if start >= 0 else -4000 :][:6000], flush=True)
    print(f"repeat: python tests/fuzz {name} --input {path[1]}\n", flush=True)


def _add_to_totals(path: Path, name: str, result: Result) -> None:
    """Add a run to the sums of all runs in the work folder."""
    totals = json.loads(path.read_text()) if path.exists() else {}
    sums = totals.setdefault(name, {"inputs": 0, "seconds": 0.0, "findings": 0})
    sums["inputs"] += result.inputs
    sums["seconds"] = round(sums["seconds"] + result.seconds, 1)
    sums["findings"] += result.findings
    path.write_text(json.dumps(totals, indent=1))


if __name__ == "__main__":
    sys.exit(main())
