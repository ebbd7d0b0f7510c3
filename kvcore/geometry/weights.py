"""How many bytes a checkpoint has, from the index that is published beside the config."""

from __future__ import annotations

import os
from pathlib import Path

from kvcore.errors import ConfigError
from kvcore.geometry.keys import Keys, read_json_object

__all__ = ["checkpoint_bytes"]

INDEX = "model.safetensors.index.json"


def checkpoint_bytes(model: str | os.PathLike[str]) -> int | None:
    """Bytes of all weights of ``model`` (a config.json or its directory), None if no index lies beside the config.

    The index is the one of huggingface/safetensors: ``metadata.total_size``.
    """
    path = Path(model)
    index = (path if path.is_dir() else path.parent) / INDEX
    if not index.exists() or not (path.is_dir() or path.name == "config.json"):
        return None
    total = Keys(read_json_object(index), str(index)).inner("metadata").raw("total_size")
    # Some writers give the total as a float; it is whole all the same.
    whole = int(total) if isinstance(total, float) and total.is_integer() else total
    if type(whole) is not int or whole <= 0:
        raise ConfigError(
            "the checkpoint's index has no usable size",
            code="KV-CFG-040",
            where=f"{index}: metadata.total_size",
            got=repr(total)[:80],
            expected="bytes of all weights",
            hint="give --weights",
        )
    return whole
