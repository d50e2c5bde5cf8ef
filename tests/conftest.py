"""Fixtures that several test files share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny model of an architecture, written once. Tests only read it."""
    folder = tmp_path_factory.mktemp("tiny")

    def path(arch: str) -> Path:
        file = folder / f"{arch}.gguf"
        return file if file.exists() else write_tiny_model(file, arch)

    return path
