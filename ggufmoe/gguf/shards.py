"""The files of one model: which they are, and whether they belong together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import FormatError, UsageError
from .header import FileHeader, open_header

# Source: llama_split_path in src/llama.cpp (prefix, "-%05d-of-%05d.gguf")
SHARD_NAME = re.compile(r"(?P<prefix>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)

ALL_SHARDS_HINT = "Download all shards of one model into one folder."


def existing_file(path: Path) -> Path:
    """``path``, or the one model in it if it is a folder.

    Raises: UsageError if there is no such file, or not exactly one model in the folder; FormatError if the
    path cannot be followed (a loop of links, no permission).
    """
    try:
        if path.is_dir():
            return _only_model_in(path)
        path.stat()
    except (FileNotFoundError, ValueError) as error:  # ValueError: a NUL in the path
        raise UsageError(f"{path}: no such file", hint="Give the path of a GGUF file, or 'demo'.") from error
    except OSError as error:
        raise FormatError(f"{path}: cannot be opened: {error.strerror or error}") from error
    return path


def _only_model_in(folder: Path) -> Path:
    """The one model of a folder. Shards of a model count once; vision projectors are no models."""
    first: dict[tuple[str, str], Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix != ".gguf" or file.name.startswith("mmproj") or file.is_dir():
            continue
        match = SHARD_NAME.fullmatch(file.name)
        first.setdefault((match["prefix"], match["count"]) if match else (file.name, ""), file)
    if len(first) != 1:
        found = ", ".join(path.name for path in list(first.values())[:5]) or "none"
        more = ", ..." if len(first) > 5 else ""
        raise UsageError(
            f"{folder}: holds {len(first)} GGUF models ({found}{more})", hint="Name one file of it."
        )
    return next(iter(first.values()))


def open_shards(path: Path) -> list[tuple[Path, FileHeader]]:
    """Every file of the model that ``path`` is, or is a shard of, in order.

    Links are not followed: shards are found by their names, and a link's target often has another name (the
    Hugging Face cache links to ``blobs/<hash>``). A name alone makes no shard: ``split.count`` does.

    Raises: FormatError that names the file which is missing, damaged, cut short, or of another model.
    """
    given = open_header(path)
    count = given.header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return [(path, given)]
    paths = _shard_paths(path, count)
    files = [(shard, given if shard == path else open_header(shard)) for shard in paths]
    _check_together(files)
    return files


def _shard_paths(path: Path, count: int) -> list[Path]:
    match = SHARD_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count or not 1 <= int(match["number"]) <= count:
        raise FormatError(
            f"{path}: this is one of {count} shards, but its name does not end in -0000N-of-{count:05}.gguf",
            hint="Shards are found by their names: restore the names they were published under.",
        )
    paths = [
        path.with_name(f"{match['prefix']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]
    for shard in paths:
        if not shard.exists():
            raise FormatError(f"{shard}: this shard is missing", hint=ALL_SHARDS_HINT)
    return paths


def _check_together(files: Sequence[tuple[Path, FileHeader]]) -> None:
    first_path, first = files[0]
    stated: dict[str, Any] = {"split.count": len(files)}
    for key in ("general.architecture", "split.tensors.count"):
        if key in first.header.metadata:
            stated[key] = first.header.metadata[key]
    for number, (path, file) in enumerate(files):
        metadata = file.header.metadata
        place = metadata.get("split.no")
        if place != number:
            raise FormatError(
                f"{path}: by its name shard {number + 1} of {len(files)}, but split.no in it is {place!r}",
                hint="A shard was renamed, or belongs to another model. " + ALL_SHARDS_HINT,
            )
        for key, value in stated.items():
            if metadata.get(key, value) != value:
                raise FormatError(
                    f"{path}: this shard belongs to another model: {key} in it is {metadata[key]!r}, in the "
                    f"first shard {value!r}",
                    hint=ALL_SHARDS_HINT,
                )
    names = [tensor.name for _, file in files for tensor in file.header.tensors]
    n_stated = stated.get("split.tensors.count", len(names))
    if n_stated != len(names):
        raise FormatError(
            f"{first_path}: the shards hold {len(names)} tensors, but split.tensors.count is {n_stated!r}",
            hint="They are shards of different models. " + ALL_SHARDS_HINT,
        )
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise FormatError(
            f"{first_path}: two shards hold the tensor {twice[0]}",
            hint="They are shards of different models. " + ALL_SHARDS_HINT,
        )
