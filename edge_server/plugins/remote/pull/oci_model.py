"""Builder of a model folder from the layers of an OCI manifest: artifacts of ORAS and CNCF ModelPack, models of Docker,
KServe's modelcar images.

A layer is a file or a tar file. Its annotation org.opencontainers.image.title (ORAS) or org.cncf.model.filepath
(github.com/modelpack/model-spec 1.0, and Docker's format 0.2) is the file's path. Layers of Docker's format 0.1
(github.com/docker/model-spec) have no path, but a media type for each kind of file. A modelcar is an image with the
model in its folder /models (https://kserve.github.io/website/docs/model-serving/storage/providers/oci).
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from pathlib import Path, PurePosixPath

from edge_server.errors import BadModelConfig
from edge_server.plugins.remote.pull.archive import (
    ARCHIVES,
    OPAQUE_WHITEOUT,
    WHITEOUT,
    PullFailed,
    UnpackLimits,
    check_names,
    unpack,
)
from edge_server.plugins.remote.pull.model_installation import find_model_folder, remove_other_files
from edge_server.plugins.remote.pull.oci_registry import OciBlob, OciManifest, OciReference, OciRegistry
from edge_server.repository.disk.free_space import check_space
from edge_server.repository.disk.safe_paths import check_relative
from edge_server.repository.disk.scan import parse_version

MODEL_FILES = (".onnx", ".gguf", ".plan", ".pt", ".pt2", ".tflite")
"""Endings of files of which one is a model."""

_IMAGE_CONFIGS = ("application/vnd.oci.image.config.v1+json", "application/vnd.docker.container.image.v1+json")
_IMAGE_FOLDER = "models"
_PLAIN_LAYER = "application/vnd.oci.image.layer.v1.tar"
"""A tar file in images. ORAS gives it to files of any kind."""
_PATHS = ("org.cncf.model.filepath", "org.opencontainers.image.title")
_UNPACK = "io.deis.oras.content.unpack"
_DOCKER_FILES = {
    "application/vnd.docker.ai.gguf.v3": "model.gguf",
    "application/vnd.docker.ai.gguf.v3.lora": "adapters/adapter.gguf",
    "application/vnd.docker.ai.gguf.v3.mmproj": "mmproj.gguf",
    "application/vnd.docker.ai.mmproj": "mmproj.gguf",
    "application/vnd.docker.ai.chat.template.jinja": "chat_template.jinja",
    "application/vnd.docker.ai.license": "LICENSE",
}
_FIRST_PART = re.compile("[A-Za-z0-9._-]+-0*1-of-[0-9]+[.]gguf")
_OF_THE_MODEL = ("config.pbtxt", "labels.txt")
"""Files of a model without versions that belong beside its versions."""


def fill(
    registry: OciRegistry,
    reference: OciReference,
    manifest: OciManifest,
    max_bytes: int,
    downloads: Path,
    unpacked: Path,
    model: Path,
) -> None:
    """Download the layers and make the model: the `Fill` of `model_installation`, from its fifth argument on.

    Archives unpack to `max_bytes` together at most. Raises PullFailed and OSError.
    """
    layers = manifest.layers
    is_image = manifest.config.media_type in _IMAGE_CONFIGS and not any(map(_annotated_path, layers))
    # Before the first byte, so that nothing is downloaded for an error.
    names = [""] * len(layers) if is_image else _file_names(layers)
    suffixes = [_archive_suffix(layer, name) for layer, name in zip(layers, names, strict=True)]
    remove_other_files(downloads, {layer.sha256 for layer in layers})
    kept = {path.name: path.stat().st_size for path in downloads.iterdir()}
    missing = sum(max(0, layer.size - kept.get(layer.sha256, 0)) for layer in layers)
    check_space(downloads, missing, f"'{reference}'")
    # All of them first: a pull that goes on after an interruption finds those that are complete.
    files = [registry.download_blob(layer, downloads) for layer in layers]
    limits = UnpackLimits(max_bytes, unpacked)
    tree = unpacked / "tree"
    tree.mkdir()
    for number, (file, name, suffix) in enumerate(zip(files, names, suffixes, strict=True)):
        if is_image:
            part = unpacked / "layer"
            part.mkdir()
            unpack(file, part, ".tar", limits, _IMAGE_FOLDER)
            _add_image_layer(part, tree)
            shutil.rmtree(part)
        elif suffix:
            unpack(file, tree, suffix, limits)
        else:
            limits.add_files(len(PurePosixPath(name).parts))
            _add_file(file, tree / name, is_used_again=file in files[number + 1 :])
    if not any(tree.iterdir()):
        where = f" in /{_IMAGE_FOLDER}, where the images of KServe have their model" if is_image else ""
        raise PullFailed(f"'{reference}' has no files{where}")
    check_names(tree, "artifact")
    found = find_model_folder(tree)
    if any(parse_version(path.name) is not None for path in found.iterdir()):
        os.rename(found, model)
    else:
        _make_version(found, model, str(reference))


def _annotated_path(layer: OciBlob) -> str:
    return next((layer.annotations[key] for key in _PATHS if layer.annotations.get(key)), "")


def _archive_suffix(layer: OciBlob, name: str) -> str:
    """Return the one of ARCHIVES by which a layer is unpacked, or "" for a file. Raises PullFailed."""
    media_type = layer.media_type
    if media_type.endswith(("+zstd", ".zstd")):
        raise PullFailed(f"a layer has the type '{media_type[:100]}': expected gzip, or no compression")
    is_tar = re.search("[.]tar([+.]gzip)?$", media_type) is not None
    if layer.annotations.get(_UNPACK) == "true" or (is_tar and not (name and media_type == _PLAIN_LAYER)):
        return ".tar"
    return next((suffix for suffix in ARCHIVES if name.lower().endswith(suffix)), "")


def _file_names(layers: tuple[OciBlob, ...]) -> list[str]:
    """Return a safe relative path for each layer, "" for a tar file without a name. Raises PullFailed."""
    counts = Counter(layer.media_type for layer in layers if not _annotated_path(layer))
    seen: Counter[str] = Counter()
    names = []
    for number, layer in enumerate(layers):
        what = f"layer {number} ('{layer.media_type[:100]}')"
        name = _annotated_path(layer)
        if not name and not _archive_suffix(layer, ""):
            if layer.media_type not in _DOCKER_FILES:
                raise PullFailed(f"{what} has no name: expected the annotation {' or '.join(_PATHS)}")
            name, count = _DOCKER_FILES[layer.media_type], counts[layer.media_type]
            seen[layer.media_type] += 1
            if count > 1:
                stem, suffix = os.path.splitext(name)
                # The names that llama.cpp expects of the parts of one model.
                name = f"{stem}-{seen[layer.media_type]:05d}-of-{count:05d}{suffix}"
        if name:
            try:
                name = str(check_relative(name, what))
            except BadModelConfig as error:
                raise PullFailed(str(error)) from None
        names.append(name)
    return names


def _add_file(file: Path, target: Path, *, is_used_again: bool) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(target):
            raise FileExistsError
    except (FileExistsError, NotADirectoryError):
        raise PullFailed(f"the artifact's '{target.name[:200]}' is in it twice") from None
    if is_used_again:
        check_space(target.parent, file.stat().st_size, f"'{target.name[:200]}'")
        shutil.copyfile(file, target)
    else:
        os.rename(file, target)


def _add_image_layer(layer: Path, tree: Path) -> None:
    """Move a layer's files over those of the layers below, and remove what its whiteouts name. Raises PullFailed."""
    for folder, folders, files in os.walk(layer):
        target = tree / Path(folder).relative_to(layer)
        if OPAQUE_WHITEOUT in files:
            _remove(target)
        target.mkdir(exist_ok=True)
        for name in files:
            if name.startswith(WHITEOUT) and not name.startswith(WHITEOUT * 2):
                removed = name.removeprefix(WHITEOUT)
                if removed in ("", ".", ".."):
                    raise PullFailed(f"the image removes '{removed}': expected the name of a file or a folder")
                _remove(target / removed)
        for name in folders:
            if not (target / name).is_dir():
                _remove(target / name)
        for name in files:
            if not name.startswith(WHITEOUT):
                _remove(target / name)
                os.rename(Path(folder) / name, target / name)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _make_version(files: Path, model: Path, source: str) -> None:
    """Make version 1 of files without a version. The only model file gets the name that servers expect."""
    names = sorted(path.name for path in files.iterdir())
    found = [name for name in names if name.lower().endswith(MODEL_FILES) and not re.match(r"mmproj.*\.gguf$", name)]
    if not found and not any(name.endswith((".xml", ".engine", ".py", ".pb", ".ubj")) for name in names):
        raise PullFailed(
            f"'{source}' has no model: expected a version, such as 1/model.onnx, or a file that ends in one of "
            f"{' '.join(MODEL_FILES)}; given {', '.join(names[:20])}"
        )
    version = model / "1"
    version.mkdir(parents=True)
    for name in names:
        is_only_model = found == [name]
        new_name = f"model{PurePosixPath(name).suffix.lower()}" if is_only_model else name
        os.rename(files / name, (model if name in _OF_THE_MODEL else version) / new_name)
    first_parts = [name for name in found if _FIRST_PART.fullmatch(name)]
    if len(first_parts) == 1 and "config.pbtxt" not in names:
        (model / "config.pbtxt").write_text(f'default_model_filename: "{first_parts[0]}"\n', "utf-8")
