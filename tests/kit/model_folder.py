"""Folders of models, as a model repository has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def model_folder(
    folder: Path, config: str = "", files: Mapping[str, str | bytes] = MappingProxyType({}), *, version: int = 1
) -> Path:
    """Write a model: its folder with a folder for a version, its configuration if there is one, and files by their
    paths below. Folders and files that exist are kept or replaced. Return the folder.

    >>> model_folder(tmp_path / "twice", 'backend: "python"', {"1/model.py": TWICE})
    """
    (folder / str(version)).mkdir(parents=True, exist_ok=True)
    for path, content in {**({"config.pbtxt": config} if config else {}), **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def parameters(**values: object) -> str:
    """Return the lines of a config.pbtxt that state parameters.

    >>> repository.add("stuck", STUB + parameters(stub_hang="true", warmup_probe="false"))
    """
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in values.items()
    )
