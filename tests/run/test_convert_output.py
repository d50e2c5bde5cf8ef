"""Where a converted file is written: never over another, never half, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conversion import profile_for
from tiny_models import (
    split_shards,
    write_tiny_model,
)

from ggufmoe import GgufMoeError, UsageError
from ggufmoe.errors import FormatError
from ggufmoe.gguf import blocks as b
from ggufmoe.gguf.model import open_model
from ggufmoe.gguf.rewriter import FileComparer
from ggufmoe.run import convert as module
from ggufmoe.run.convert import ConvertOptions, convert, export
from ggufmoe.run.quantize import Quantization


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf", "qwen3moe", n_expert=4)


# Where it is written ----------------------------------------------------------------------------------------


def test_nothing_is_overwritten_without_force(tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "b.gguf"
    out.write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        convert(tiny, out)
    assert out.read_text() == "mine"
    convert(tiny, out, ConvertOptions(force=True))
    assert open_model(out).blocks is not None


@pytest.mark.parametrize("how", ["same", "link", "hard link", "shard"])
def test_the_input_is_never_written_over(tiny: Path, tmp_path: Path, how: str) -> None:
    source = Path(shutil.copy(tiny, tmp_path / "model.gguf"))
    out = source
    if how == "link":
        out = tmp_path / "link.gguf"
        out.symlink_to(source)
    elif how == "hard link":
        out = tmp_path / "hard.gguf"
        out.hardlink_to(source)
    elif how == "shard":
        paths = split_shards(tiny, tmp_path, 20)
        source, out = paths[0], paths[1]
    before = out.read_bytes()
    with pytest.raises(UsageError, match="that is the model itself"):
        convert(source, out, ConvertOptions(force=True))
    assert out.read_bytes() == before


def test_no_space_is_noticed_before_a_byte_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    with pytest.raises(GgufMoeError, match=r"needs [\d,]+ bytes, 1,000 are free there \([\d,]+ too few\)"):
        convert(tiny, tmp_path / "b.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: the write fails in the middle."""
    code = (
        "import resource, sys; from pathlib import Path; from ggufmoe.run.convert import convert\n"
        "from ggufmoe import GgufMoeError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: convert(sys.argv[1], Path(sys.argv[2]))\n"
        "except GgufMoeError as error: print(error)"
    )
    out = tmp_path / "b.gguf"
    done = subprocess.run([sys.executable, "-c", code, tiny, out], capture_output=True, text=True, timeout=60)
    assert f"{out}: cannot be written: File too large" in done.stdout, done
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/proc/ggufmoe.gguf", "/sys/ggufmoe.gguf"])
def test_a_place_that_cannot_be_written_is_named(tiny: Path, place: str) -> None:
    for quantization in (Quantization(), Quantization("Q4_0", "Q4_0", allow_requantize=True)):
        with pytest.raises(GgufMoeError, match=f"{place}: (cannot be written|needs)"):
            convert(tiny, Path(place), ConvertOptions(quantization=quantization))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tiny: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    with pytest.raises(GgufMoeError, match="cannot be written: Permission denied"):
        convert(tiny, tmp_path / "b.gguf")


def test_a_folder_and_a_missing_folder_are_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a folder, not a file"):
        convert(tiny, tmp_path)
    with pytest.raises(UsageError, match="its folder does not exist"):
        convert(tiny, tmp_path / "no" / "b.gguf")


def test_an_interrupt_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    def interrupt(_phase: str, done: int, total: int) -> None:
        if done > total // 2:
            assert [path.suffix for path in tmp_path.iterdir()] == [".part"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny, tmp_path / "b.gguf", on_progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_every_byte(tiny: Path, tmp_path: Path) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    convert(
        tiny,
        tmp_path / "b.gguf",
        ConvertOptions(verify=True),
        lambda phase, done, total: seen.setdefault(phase, []).append((done, total)),
    )
    assert list(seen) == ["Converting", "Verifying"]
    for steps in seen.values():
        assert steps[-1][0] == steps[-1][1]
        assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert seen["Converting"][-1][1] == tiny.stat().st_size


def test_verify_notices_what_the_disk_lost(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def corrupting(fd: int, path: Path) -> FileComparer:
        os.pwrite(fd, b"\xff\xff", 200_000)
        return FileComparer(fd, path)

    monkeypatch.setattr(module, "FileComparer", corrupting)
    with pytest.raises(FormatError, match=r"differs from the source at byte [\d,]+"):
        convert(tiny, tmp_path / "b.gguf", ConvertOptions(verify=True))
    assert list(tmp_path.iterdir()) == []


def test_export_of_what_is_no_block_file_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a block file"):
        export(tiny, tmp_path / "e.gguf")


def test_block_names_are_unique_and_their_spans_disjoint(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "b.gguf", ConvertOptions(profile=profile_for(tiny)))
    model = open_model(tmp_path / "b.gguf")
    found = list(b.list_blocks(model.banks, model.heat))
    assert len({block.name for block in found}) == len(found) == 2 * 3 * 4
    ends = [block.offset + block.n_bytes for block in found]
    assert all(end <= later.offset for end, later in zip(ends, found[1:], strict=False))
