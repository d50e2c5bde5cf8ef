"""What the documents promise: their commands are the ones that are run, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")))


def test_ci_runs_the_commands_of_the_readme() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    install = 'CMAKE_ARGS="-DGGML_RPC=ON" .venv/bin/pip install --no-cache-dir -e ".[dev]"'
    for document in ("README.md", "README.zh-CN.md", "CONTRIBUTING.md"):
        assert f"python3 -m venv .venv && {install}" in (ROOT / document).read_text(), document
    assert install in ci
    assert ".venv/bin/pytest" in ci


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_both_readmes_have_the_same_commands_and_figures() -> None:
    """The translation drifts in words only: every code block and every table figure is the same."""
    english, chinese = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md")
    )
    blocks = [re.findall(r"^```\n(.*?)^```", text, re.DOTALL | re.MULTILINE) for text in (english, chinese)]
    assert blocks[0] == blocks[1]
    tables = [
        [re.findall(r"\d+(?:[.,]\d+)*", line) for line in text.splitlines() if line.startswith("|")]
        for text in (english, chinese)
    ]
    assert tables[0] == tables[1]
