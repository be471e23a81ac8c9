"""Call of a Python model's `auto_complete_config`."""

from __future__ import annotations

import json
import logging

from edge_server.backends.base import ModelFile
from edge_server.backends.python.calling_model import Host, enter
from edge_server.backends.python.error_translation import RAISED, full_text, let_go, told
from edge_server.backends.python.model_config import ModelConfig
from edge_server.backends.python.module_loader import ModelModules
from edge_server.backends.runtime_library import file_title
from edge_server.errors import LoadError

log = logging.getLogger(__name__)


def completed(file: ModelFile, config_json: str, *, is_alone: bool = False) -> str | None:
    """Return the configuration as the model completes it, None when it has no `auto_complete_config`.

    `is_alone`: in a process of the model's own. The file is run for this and forgotten again. Raises LoadError.
    """
    source = ModelModules(file.path, file.model_dir, is_alone=is_alone)
    host = Host(file.model_dir.name, source.package, None, folder=str(file.path.parent))
    enter(host)
    try:
        module = source.load()
        complete = getattr(getattr(module, "TritonPythonModel", None), "auto_complete_config", None)
        if complete is None:
            return None
        found = complete(ModelConfig(config_json))
        if not isinstance(found, ModelConfig):
            raise LoadError(
                f"{file_title(file)}: auto_complete_config must return the configuration that it was given, "
                f"got {type(found).__name__}"
            )
        return json.dumps(found.as_dict())
    except RAISED as error:
        if isinstance(error, LoadError):
            raise
        log.error("%s: auto_complete_config failed: %s", file_title(file), full_text(error))
        problem = LoadError(f"{file_title(file)}: {told(error, file.model_dir)}")
        let_go(error)
        raise problem from None
    finally:
        source.unload()
