"""Names that people, caches and shells make."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiny_models import split_shards, write_tiny_model

from ggufmoe.errors import FormatError, UsageError
from ggufmoe.gguf.model import open_model

NAMES = {
    "cyrillic": "Загрузки 模型.gguf",
    "quotes": """it's "q" $x #1%20.gguf""",
    "newline": "two\nlines.gguf",
    "not unicode": os.fsdecode(b"\xff.gguf"),
    "dash": "-m.gguf",
    "markup": "[red]x[INST].gguf",
    "longest": "m" * 250 + ".gguf",
    "no suffix": "sha256-" + "0" * 64,
    "backslash": "a\\b.gguf",
}


@pytest.fixture(scope="module")
def model_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("names") / "m.gguf"
    return write_tiny_model(path, "qwen3moe", n_layer=1, n_expert=4).read_bytes()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_file_opens_under_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_bytes: bytes, name: str
) -> None:
    (tmp_path / name).write_bytes(model_bytes)
    monkeypatch.chdir(tmp_path)
    for path in (name, tmp_path / name, Path("..") / tmp_path.name / name):
        model = open_model(path)
        assert model.paths == (Path(path),)  # as it was given: a link's own name matters
        assert len(model.banks) == 1


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_an_error_names_the_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(FormatError) as raised:
        open_model(tmp_path / name)
    assert str(raised.value).startswith(f"{tmp_path / name}: too short")


@pytest.mark.parametrize(
    "name", ["Загрузки 模型", "two\nlines", os.fsdecode(b"\xff"), "-m", "a-00001-of-00002"]
)
def test_shards_are_found_under_any_name(tmp_path: Path, model_bytes: bytes, name: str) -> None:
    whole = tmp_path / f"{name}.gguf"
    whole.write_bytes(model_bytes)
    folder = tmp_path / name
    folder.mkdir()
    shards = split_shards(whole, folder, 8)
    assert len(shards) > 1
    assert open_model(shards[1]).paths == tuple(shards)
    assert open_model(folder).paths == tuple(shards)


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").symlink_to("b.gguf")
    (tmp_path / "b.gguf").symlink_to("a.gguf")
    with pytest.raises(FormatError, match=r"a.gguf: cannot be opened: Too many levels of symbolic links"):
        open_model(tmp_path / "a.gguf")


@pytest.mark.parametrize("name", ["absent.gguf", "absent/m.gguf", "a\0b.gguf"])
def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"no such file"):
        open_model(tmp_path / name)


def test_a_dangling_link_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(UsageError, match=r"m.gguf: no such file"):
        open_model(tmp_path / "m.gguf")


def test_a_name_longer_than_any_file_system_takes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"File name too long"):
        open_model(tmp_path / ("m" * 300))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "m.gguf").chmod(0)
    with pytest.raises(FormatError, match=r"m.gguf: cannot be opened: Permission denied"):
        open_model(tmp_path / "m.gguf")
