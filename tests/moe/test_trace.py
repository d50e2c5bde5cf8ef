"""Routing traces: what is written is read again, and what is no trace is refused with its line."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmoe.errors import FormatError
from ggufmoe.moe.trace import Trace, TraceBank, TraceHeader, TraceStep, TraceWriter, read_trace

BANKS = (
    TraceBank(0, "exps", 8, 2, 4096, 3, (5, 1)),
    TraceBank(2, "exps", 8, 2, 4096, 3),
    TraceBank(2, "chexps", 4, 2),
)
HEADER = TraceHeader("a model\nwith “quotes”", "qwen3moe", 4, BANKS, "lfru", 2)
STEPS = (
    TraceStep(0, True, 0, "exps", ((5, 1), (2, 7), (0, 1)), hits=3),
    TraceStep(0, True, 2, "chexps", ((3, 0), (1, 2), (0, 3))),
    TraceStep(1, False, 0, "exps", ((5, 2),), committed=(2, 7), abandoned=(0,), max_pending=1, hits=2),
)
WRITTEN = """\
ggufmoe-trace 1
{"model": "a model\\nwith \\u201cquotes\\u201d", "arch": "qwen3moe", "n_layer": 4, "policy": "lfru", "max_pending": 2}
{"layer":0,"bank":"exps","n_expert":8,"n_used":2,"expert_bytes":4096,"n_slots":3,"residents":[5,1]}
{"layer":2,"bank":"exps","n_expert":8,"n_used":2,"expert_bytes":4096,"n_slots":3,"residents":[]}
{"layer":2,"bank":"chexps","n_expert":4,"n_used":2,"expert_bytes":0,"n_slots":null,"residents":[]}
0 p 3 0 exps 5,1;2,7;0,1 h=3
0 p 3 2 chexps 3,0;1,2;0,3
1 d 1 0 exps 5,2 c=2,7 a=0 m=1 h=2
"""
CSV = """\
# route_trace v1
# model=/some where/a-model.gguf arch=olmoe n_layer=2 n_expert=8 n_expert_used=2
# layer=0 expert_bytes=4096 dense_bytes=10
# layer=1 expert_bytes=2048 dense_bytes=10
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
0,0,0,0,0,5,0.7,0,4096
0,0,0,0,1,1,0.3,0,4096
0,0,1,0,0,2,0.7,0,4096
0,0,1,0,1,5,0.3,0,0
0,0,1,1,0,7,0.7,0,2048
0,1,2,0,0,5,0.7,0,0
0,1,2,1,0,7,0.7,0,0
1,0,0,0,0,6,0.7,0,4096
"""


def read(text: str) -> tuple[TraceHeader, list[TraceStep]]:
    trace = read_trace(io.StringIO(text), "a.trace")
    return trace.header, list(trace.steps)


def written(header: TraceHeader, steps: tuple[TraceStep, ...]) -> str:
    file = io.StringIO()
    writer = TraceWriter(file, header)
    for step in steps:
        writer.write(step)
    return file.getvalue()


def test_golden_text() -> None:
    assert written(HEADER, STEPS) == WRITTEN
    assert read(WRITTEN) == (HEADER, list(STEPS))


def test_windows_lines_and_lines_without_an_end() -> None:
    assert read(WRITTEN.replace("\n", "\r\n")) == (HEADER, list(STEPS))
    trace = read_trace(WRITTEN.splitlines())
    assert (trace.header, list(trace.steps)) == (HEADER, list(STEPS))


@st.composite
def traces(draw: st.DrawFn) -> tuple[TraceHeader, tuple[TraceStep, ...]]:
    def experts(n_expert: int, most: int, least: int = 0) -> tuple[int, ...]:
        chosen = draw(st.permutations(range(n_expert)))
        return tuple(chosen[: draw(st.integers(least, min(most, n_expert)))])

    banks = []
    for layer in range(draw(st.integers(1, 3))):
        n_expert = draw(st.integers(1, 9))
        n_slots = draw(st.none() | st.integers(0, n_expert))
        n_bytes = draw(st.integers(0, 2**40))
        residents = experts(n_expert, n_slots or 0)
        banks.append(
            TraceBank(layer, "exps", n_expert, draw(st.integers(1, n_expert)), n_bytes, n_slots, residents)
        )
    header = TraceHeader(draw(st.text()), "arch", 3, tuple(banks), draw(st.none() | st.text()))
    steps = []
    for number in range(draw(st.integers(0, 5))):
        bank = draw(st.sampled_from(banks))
        tokens = tuple(
            experts(bank.n_expert, bank.n_used, bank.n_used) for _ in range(draw(st.integers(1, 3)))
        )
        committed, abandoned = experts(bank.n_expert, 3), experts(bank.n_expert, 3)
        hits = draw(st.none() | st.integers(0, len(tokens) * bank.n_used))
        limit = draw(st.none() | st.integers(0, 99))
        ended = (committed, abandoned, limit, hits)
        steps.append(TraceStep(number, draw(st.booleans()), bank.layer, bank.bank, tokens, *ended))
    return header, tuple(steps)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(traces())
def test_what_is_written_is_read(case: tuple[TraceHeader, tuple[TraceStep, ...]]) -> None:
    header, steps = case
    assert read(written(header, steps)) == (header, list(steps))


def test_reading_is_a_stream() -> None:
    """A trace without an end: steps come while it is read, and only as far as they are asked for."""

    def endless() -> Iterator[str]:
        yield from WRITTEN.splitlines(keepends=True)[:5]
        for number in itertools.count():
            assert number < 1000
            yield f"{number} d 1 0 exps 5,2\n"

    trace = read_trace(endless())
    assert [step.step for step in itertools.islice(trace.steps, 900)] == list(range(900))


def test_route_trace_v1() -> None:
    header, steps = read(CSV)
    banks = (TraceBank(0, "exps", 8, 2, 4096), TraceBank(1, "exps", 8, 2, 2048))
    assert header == TraceHeader("a-model.gguf", "olmoe", 2, banks)
    assert steps == [
        TraceStep(0, True, 0, "exps", ((5, 1),)),
        TraceStep(1, True, 0, "exps", ((2, 5),)),
        TraceStep(1, True, 1, "exps", ((7,),)),
        TraceStep(2, False, 0, "exps", ((5,),)),
        TraceStep(2, False, 1, "exps", ((7,),)),
        TraceStep(3, True, 0, "exps", ((6,),)),  # the next turn
    ]


# Hostile text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("ggufmoe-trace 1", "", 1, "is no routing trace"),
        ("ggufmoe-trace 1", "GGUF\0\0", 1, "is no routing trace"),
        ("ggufmoe-trace 1", "ggufmoe-trace 2", 1, "version 2 of the trace format is newer than 1"),
        ("ggufmoe-trace 1", "ggufmoe-trace", 1, "'' is no version"),
        ("ggufmoe-trace 1", "ggufmoe-trace 0", 1, "no version 0"),
        ("ggufmoe-trace 1", "ggufmoe-trace " + "9" * 5000, 1, "is no version"),
        ('{"model"', '["model"', 2, "the header's JSON cannot be read"),
        ('{"model"', "[" * 100_000 + '"', 2, "the header's JSON cannot be read"),
        ('"n_layer": 4', '"n_layer": "4"', 2, "no number 'n_layer'"),
        ('"n_layer": 4', '"n_layer": true', 2, "no number 'n_layer'"),
        ('"n_layer": 4', '"n_layer": NaN', 2, "no number 'n_layer'"),
        ('"arch"', '"arc"', 2, "no text 'arch'"),
        ('"n_expert":8', '"n_expert":8000000000', 3, "no number 'n_expert' of 0 to 4,096"),
        ('"n_expert":8', '"n_expert":-1', 3, "no number 'n_expert'"),
        ('"n_used":2', '"n_used":9', 3, "no number 'n_used' of 0 to 8"),
        ('"n_slots":3', '"n_slots":9', 3, "no number 'n_slots'"),
        ("[5,1]", "[5,8]", 3, "a resident '8' of 8 experts"),
        ("[5,1]", "[5,5]", 3, "an expert is resident twice"),
        ("[5,1]", "[5,1,2,3]", 3, "more residents than slots"),
        ("[5,1]", '"51"', 3, "more residents than slots"),
        ('"bank":"exps"', '"bank":"a b"', 3, "no name of a bank"),
        ('"layer":2,"bank":"chexps"', '"layer":2,"bank":"exps"', 5, "has its bank 'exps' twice"),
        ("5,1;2,7;0,1", "5,1;2,7", 6, "3 tokens of 2 experts each are expected"),
        ("5,1;2,7;0,1", "5,1;2;0,1", 6, "3 tokens of 2 experts each are expected"),
        ("5,1;2,7;0,1", "5,1;2,8;0,1", 6, "names an expert twice, or one that 8 experts do not have"),
        ("5,1;2,7;0,1", "5,1;2,2;0,1", 6, "names an expert twice"),
        ("5,1;2,7;0,1", "5,1;2,-7;0,1", 6, "'-7' is no expert"),
        ("5,1;2,7;0,1", "5,1;2,;0,1", 6, "'' is no expert"),
        ("5,1;2,7;0,1", "5,1;2,²;0,1", 6, "'²' is no expert"),
        ("h=3", "h=7", 6, "7 hits among 6 routings"),
        ("h=3", "h=", 6, "'' is no number of hits"),
        ("h=3", "x=3", 6, "'x=3' is not understood"),
        ("h=3", "h=3 h=3", 6, "'h=3' is not understood"),
        ("2 chexps", "1 chexps", 7, "the header has no bank 'chexps' of layer 1"),
        ("0 p 3 2", "0 q 3 2", 7, "is no step"),
        ("0 p 3 2 chexps 3,0;1,2;0,3\n", "\n", 7, "is no step"),
        ("1 d 1", "1e3 d 1", 8, "'1e3' is no number"),
        ("0 p 3 0", "2 p 3 0", 7, "step 0 comes after step 2"),
        ("c=2,7", "c=2,9", 8, "one that 8 experts do not have"),
        ("m=1", "m=-1", 8, "'-1' is no limit"),
        (" m=1 h=2\n", "", 8, "the file ends inside this line"),
    ],
)
def test_hostile_lines(old: str, new: str, line: int, message: str) -> None:
    assert old in WRITTEN
    with pytest.raises(FormatError, match=re.escape(message)) as error:
        read(WRITTEN.replace(old, new, 1))
    assert str(error.value).startswith(f"a.trace: line {line}: ")
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("route_trace v1", "route_trace v2", "version 2 of the trace format is newer"),
        ("route_trace v1", "route_trace vx", "'x' is no version"),
        ("n_layer=2", "n_layer=", "model, arch, n_layer"),
        ("n_expert=8", "n_expert=99999", "2 layers with 2 of 99999 experts cannot be"),
        ("n_layer=2", "n_layer=" + "9" * 5000, "is no number"),
        ("# layer=1", "# layer=2", "layer 2 of 2"),
        ("turn,phase", "phase,turn", "the columns turn,phase,step,layer,slot,expert are expected"),
        ("0,0,1,1,0,7", "0,0,1,2,0,7", "the header has no layer 2"),
        ("0,0,1,1,0,7", "0,0,1,1,0,8", "one that 8 experts do not have"),
        ("0,0,0,0,1,1,", "0,0,0,0,1,5,", "one twice"),
        ("0,1,2,0,0,5", "0,2,2,0,0,5", "phase 2 is neither"),
        ("0,1,2,0,0,5", "0,1,2,0,0,five", "'five' is no number"),
        ("0,1,2,0,0,5,0.7,0,0", "0,1", "2 columns instead of at least 6"),
        ("1,0,0,0,0,6,0.7,0,4096\n", "1,0,0", "the file ends inside this line"),
    ],
)
def test_hostile_csv(old: str, new: str, message: str) -> None:
    assert old in CSV
    with pytest.raises(FormatError, match=re.escape(message)) as error:
        read(CSV.replace(old, new, 1))
    assert re.match(r"a\.trace: line \d+: ", str(error.value)) and len(str(error.value)) < 400


@pytest.mark.parametrize("text", [WRITTEN, CSV])
def test_every_cut_is_an_error_or_a_shorter_trace(text: str) -> None:
    whole = read(text)[1]
    for length in range(len(text)):
        try:
            steps = read(text[:length])[1]
        except FormatError:
            continue
        assert steps == whole[: len(steps)] or text is CSV  # a row of a token may be missing in a CSV


def test_a_step_says_how_much_it_routes() -> None:
    assert [step.n_routings for step in STEPS] == [6, 6, 2]
    assert replace(STEPS[0], tokens=()).n_routings == 0
    assert isinstance(read_trace(io.StringIO(WRITTEN)), Trace)
