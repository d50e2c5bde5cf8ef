"""The two tables of a block file: what other tools see of it, and what is refused."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
from conversion import profile_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import ARCHITECTURES, RawTensor, rewrite, write_tiny_model

from ggufmoe.errors import FormatError, GgufMoeError
from ggufmoe.gguf import blocks as b
from ggufmoe.gguf.experts import expert_span
from ggufmoe.gguf.header import open_header
from ggufmoe.gguf.model import Model, open_model
from ggufmoe.gguf.scanner import scan_header
from ggufmoe.gguf.writer import STRING, U16, U32, key_record
from ggufmoe.run.convert import ConvertOptions, convert, export


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("stock") / "tiny.gguf", "deepseek2", n_expert=4)


@pytest.fixture(scope="module")
def plain(stock: Path) -> Path:
    path = stock.with_name("plain.gguf")
    convert(stock, path)
    return path


@pytest.fixture(scope="module")
def reordered(stock: Path) -> Path:
    path = stock.with_name("reordered.gguf")
    convert(stock, path, ConvertOptions(profile=profile_for(stock)))
    return path


def read_at(path: Path, offset: int, n_bytes: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(n_bytes)


# What it is ---------------------------------------------------------------------------------------------


def test_the_tail_of_a_block_file_is_the_stock_file(stock: Path, plain: Path, tmp_path: Path) -> None:
    convert(stock, tmp_path / "s.gguf", ConvertOptions(layout="stock"))
    assert plain.read_bytes()[open_model(plain).stock_offset :] == (tmp_path / "s.gguf").read_bytes()


def test_the_tail_of_a_reordered_file_is_the_reordered_stock_file(
    stock: Path, reordered: Path, tmp_path: Path
) -> None:
    options = ConvertOptions(layout="stock", profile=profile_for(stock))
    convert(stock, tmp_path / "s.gguf", options)
    tail = reordered.read_bytes()[open_model(reordered).stock_offset :]
    assert tail == (tmp_path / "s.gguf").read_bytes()
    assert open_model(tmp_path / "s.gguf").orders == open_model(reordered).orders != {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_gguf_py_sees_every_block_with_its_bytes(arch: str, tmp_path: Path) -> None:
    stock = write_tiny_model(tmp_path / "s.gguf", arch, n_expert=4)
    path = tmp_path / "b.gguf"
    convert(stock, path)
    original = open_model(stock)
    reader = gguf.GGUFReader(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for bank in original.banks:
        for stack in bank.weights.values():
            for expert in range(bank.n_expert):
                block = tensors.pop(b.block_name(stack.name, expert))
                span = expert_span(stack, expert)
                assert block.data.tobytes() == read_at(stock, stack.offset, stack.n_bytes)[span]
                assert tuple(block.shape) == stack.ne[:2]
                assert block.data_offset % 32 == 0
    assert tensors.pop(b.STOCK_VIEW).tensor_type == gguf.GGMLQuantizationType.I8
    assert set(tensors) == {
        t.name
        for t in original.tensors
        if t not in [w for bank in original.banks for w in bank.weights.values()]
    }
    for name, tensor in tensors.items():
        source = original.by_name[name]
        assert tensor.data.tobytes() == read_at(stock, source.offset, source.n_bytes)


def test_gguf_dump_lists_every_block(reordered: Path) -> None:
    dump = Path(sys.executable).with_name("gguf-dump")
    done = subprocess.run([dump, "--json", reordered], capture_output=True, text=True, timeout=60, check=True)
    listed = json.loads(done.stdout)["tensors"]
    names = [block.name for block in b.list_blocks(open_model(reordered).banks, {})]
    assert [name for name in listed if "_exps." in name] == names
    assert len(names) == 4 * 3


def test_a_block_file_opens_as_the_model_it_was(stock: Path, plain: Path) -> None:
    original, model = open_model(stock), open_model(plain)
    same = {key: value for key, value in model.metadata.items() if key != "general.alignment"}
    assert same == original.metadata
    assert [(t.name, t.type_name, t.ne, t.n_bytes) for t in model.tensors] == [
        (t.name, t.type_name, t.ne, t.n_bytes) for t in original.tensors
    ]
    for tensor in model.tensors:
        source = original.by_name[tensor.name]
        assert read_at(plain, tensor.offset, tensor.n_bytes) == read_at(stock, source.offset, tensor.n_bytes)
    facts = model.blocks
    assert facts is not None
    assert (facts.version, facts.order, facts.source_names) == (1, "file", ("tiny.gguf",))
    assert facts.alignment == 512  # 64 x 128 weights of Q8_0 are 17 x 512 bytes
    assert not model.orders and not model.heat


def test_blocks_keep_their_original_numbers(stock: Path, reordered: Path) -> None:
    original, model, profile = open_model(stock), open_model(reordered), profile_for(stock)
    (bank,) = model.banks
    counts = profile[bank.layer]
    assert list(bank.experts) == sorted(range(4), key=lambda expert: -counts[expert])
    assert bank.by_original(["abcd"[expert] for expert in bank.experts]) == ["a", "b", "c", "d"]
    for block in b.list_blocks(model.banks, model.heat):
        assert block.heat == counts[block.expert]
        stack = original.by_name[f"blk.{block.layer}.ffn_{block.projection}_exps.weight"]
        expected = read_at(stock, stack.offset, stack.n_bytes)[expert_span(stack, block.expert)]
        assert read_at(reordered, block.offset, block.n_bytes) == expected
        assert block.name.endswith(f".{block.expert}.weight")


@pytest.mark.parametrize(
    ("sizes", "alignment"), [([4096 * 3], 4096), ([8192, 512 * 3], 512), ([17 * 32], 32), ([], 4096)]
)
def test_blocks_are_aligned_as_far_as_their_sizes_allow(sizes: list[int], alignment: int) -> None:
    assert b.block_alignment([("t", size) for size in sizes]) == alignment


@pytest.mark.parametrize("size", [16, 17, 48, 8192 + 16])
def test_sizes_that_fit_no_alignment_are_refused(size: int) -> None:
    with pytest.raises(FormatError, match=f"one expert of t has {size:,} bytes, which is no multiple of 32"):
        b.block_alignment([("t", size)])


def test_a_model_whose_experts_fit_no_alignment_can_be_written_in_stock_layout(tmp_path: Path) -> None:
    def shrink(tensors: list[RawTensor]) -> list[RawTensor]:
        # one row of one MXFP4 block per expert: 17 bytes
        return [RawTensor(t.name, 39, (32, 1, 4), bytes(4 * 17)) if "_exps" in t.name else t for t in tensors]

    base = write_tiny_model(tmp_path / "base.gguf", "qwen3moe", n_expert=4)
    path = rewrite(base, tmp_path / "odd.gguf", tensors=shrink)
    with pytest.raises(FormatError, match=r"odd.gguf: one expert of blk.0.ffn_gate_exps.weight has 17 bytes"):
        convert(path, tmp_path / "b.gguf")
    assert not (tmp_path / "b.gguf").exists()
    convert(path, tmp_path / "s.gguf", ConvertOptions(layout="stock"))
    assert open_model(tmp_path / "s.gguf").n_bytes == open_model(path).n_bytes


# What is kept, and what is refused ------------------------------------------------------------------------


def edited(path: Path, copy: Path, old: bytes, new: bytes, *, times: int = 1) -> Path:
    data = path.read_bytes()
    assert data.count(old) >= times and len(old) == len(new)
    copy.write_bytes(data.replace(old, new, times))
    return copy


def test_a_future_version_is_refused_by_its_number(plain: Path, tmp_path: Path) -> None:
    version = key_record(b.VERSION_KEY, U32, 1).data
    path = edited(plain, tmp_path / "future.gguf", version, key_record(b.VERSION_KEY, U32, 2).data)
    with pytest.raises(FormatError, match=r"block file of version 2, newer .* \(up to 1\)") as caught:
        open_model(path)
    assert caught.value.hint is not None and "newer ggufmoe" in caught.value.hint


def test_a_future_stock_layout_is_refused_too(stock: Path, tmp_path: Path) -> None:
    path = tmp_path / "s.gguf"
    convert(stock, path, ConvertOptions(layout="stock", profile=profile_for(stock)))
    version = key_record(b.VERSION_KEY, U32, 1).data
    edited(path, tmp_path / "f.gguf", version, key_record(b.VERSION_KEY, U32, 3).data)
    with pytest.raises(FormatError, match="reordered by version 3 of the format, newer than"):
        open_model(tmp_path / "f.gguf")


def with_unknown_key(path: Path, copy: Path, key: bytes) -> Path:
    """Put a record into the block table; the file's data moves by whole alignments."""
    data = path.read_bytes()
    facts = open_model(path).blocks
    assert facts is not None
    head_end = open_model(path).stock_offset
    n_keys = struct.unpack_from("<Q", data, 16)[0]
    keys = b"".join(record.data for record in facts.keys)
    table = data[24 + len(keys) : scan_header(data[:head_end]).end]
    head = data[:16] + struct.pack("<Q", n_keys + 1) + keys + key + table
    copy.write_bytes(head.ljust(-(-len(head) // facts.alignment) * facts.alignment, b"\0") + data[head_end:])
    return copy


def test_unknown_keys_are_kept(reordered: Path, stock: Path, tmp_path: Path) -> None:
    record = key_record("ggufmoe.future.idea", STRING, ["a", "b"], array=True).data
    path = with_unknown_key(reordered, tmp_path / "unknown.gguf", record)
    convert(path, tmp_path / "again.gguf")
    model = open_model(tmp_path / "again.gguf")
    assert model.blocks is not None
    assert record in [key.data for key in model.blocks.keys]
    assert model.orders == open_model(reordered).orders
    export(path, tmp_path / "s.gguf")
    assert (tmp_path / "s.gguf").read_bytes() == stock.read_bytes()


def test_the_architecture_need_not_be_the_first_key(plain: Path, tmp_path: Path) -> None:
    facts = open_model(plain).blocks
    assert facts is not None
    data = plain.read_bytes()
    keys = [key.data for key in facts.keys]
    moved = b"".join([*keys[1:], keys[0]])
    path = tmp_path / "moved.gguf"
    path.write_bytes(data[:24] + moved + data[24 + len(moved) :])
    assert open_model(path).tensors == open_model(plain).tensors


Damage = Callable[[bytes, Model], bytes]


def in_head(old: bytes, new: bytes) -> Damage:
    def damage(data: bytes, _model: Model) -> bytes:
        assert old in data and len(old) == len(new)
        return data.replace(old, new, 1)

    return damage


def in_stock(old: bytes, new: bytes) -> Damage:
    def damage(data: bytes, model: Model) -> bytes:
        head, tail = data[: model.stock_offset], data[model.stock_offset :]
        assert old in tail
        return head + tail.replace(old, new, 1)

    return damage


def offset_of_block(data: bytes, name: bytes) -> int:
    return data.index(name) + len(name) + 4 + 16 + 4


def move_block(data: bytes, _model: Model) -> bytes:
    position = offset_of_block(data, b"blk.1.ffn_up_exps.1.weight")
    (offset,) = struct.unpack_from("<Q", data, position)
    return data[:position] + struct.pack("<Q", offset + 512) + data[position + 8 :]


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no version": (in_head(b"ggufmoe.version", b"ggufmoe.varsion"), r"without a version \(ggufmoe.version\)"),
    "no stock view": (in_head(b"ggufmoe.stock_view", b"ggufmoe.stack_view"), "does not begin with"),
    "a moved block": (move_block, r"does not describe the same bytes .*\(entry \d\d of"),
    "a renamed block": (in_head(b"ffn_up_exps.1.w", b"ffn_up_exps.9.w"), r"not describe the same bytes"),
    "a block twice": (in_head(b"ffn_up_exps.1.w", b"ffn_up_exps.0.w"), r"not describe the same bytes"),
    "a stack renamed in the stock table": (in_stock(b"ffn_up_exps", b"ffn_uq_exps"), r"entries, by"),
    "another architecture in the stock table": (in_stock(b"GGUF", b"GGUX"), r"not a block file we can trust"),
    "another alignment": (
        in_head(
            key_record("general.alignment", U32, 512).data, key_record("general.alignment", U32, 256).data
        ),
        r"not a block file we can trust",
    ),
    "alignment 48": (
        in_head(
            key_record("general.alignment", U32, 512).data, key_record("general.alignment", U32, 48).data
        ),
        r"alignment",
    ),
    "the stock view cut": (lambda data, model: data[: model.stock_offset + 100], "cut short"),
    "the data cut": (lambda data, _model: data[:-4096], "cut short"),
    "the table cut": (lambda data, _model: data[:2000], "ends before"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_tables_that_disagree_are_refused(plain: Path, tmp_path: Path, name: str) -> None:
    damage, says = DAMAGES[name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damage(plain.read_bytes(), open_model(plain)))
    with pytest.raises(FormatError, match=says) as caught:
        open_model(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_an_order_that_is_no_permutation_is_refused(reordered: Path, tmp_path: Path) -> None:
    order = open_model(reordered).orders[1, "exps"]
    old = key_record("ggufmoe.permutation.1.exps", U16, order, array=True).data
    new = key_record("ggufmoe.permutation.1.exps", U16, [order[0], *order[:-1]], array=True).data
    path = edited(reordered, tmp_path / "twice.gguf", old, new)
    with pytest.raises(FormatError, match="no permutation"):
        open_model(path)


def test_a_claim_of_many_experts_makes_no_list(plain: Path, tmp_path: Path) -> None:
    """Dimensions (0, n, 2^40) take no bytes; they must not take memory either."""
    data, model = bytearray(plain.read_bytes()), open_model(plain)
    name = b"blk.1.ffn_up_exps.weight"
    position = data.index(name, model.stock_offset) + len(name) + 4
    struct.pack_into("<3Q", data, position, 0, 1, 2**40)
    path = tmp_path / "many.gguf"
    path.write_bytes(data)
    with pytest.raises(FormatError):
        open_model(path)


@settings(
    max_examples=300,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(changes=st.lists(st.tuples(st.integers(0, 1 << 15), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_of_both_tables_never_do_more_than_an_error(
    reordered: Path, changes: list[tuple[int, int]]
) -> None:
    data, end = bytearray(reordered.read_bytes()), open_header(reordered).header.data_offset
    for position, value in changes:
        data[position % end] = value
    path = reordered.with_name("changed.gguf")
    path.write_bytes(data)
    try:
        model = open_model(path)
        assert model.n_bytes <= len(data)
        assert len(list(b.list_blocks(model.banks, model.heat))) <= 100
    except GgufMoeError as error:
        assert str(path) in str(error)
        return
    out = path.with_name("from-changed.gguf")
    out.unlink(missing_ok=True)
    try:
        convert(path, out)
        assert open_model(out).n_bytes == model.n_bytes
    except GgufMoeError:
        assert not out.exists()
    assert not list(path.parent.glob(".*.part"))
