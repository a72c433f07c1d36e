"""Every notebook runs from a clean state, unsolved and then solved, and is stored with its outputs and figures."""

import base64
import json
import os
import pathlib
import re
import shutil
import struct

import nbclient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"01": 3, "02": 4, "03": 6, "04": 3, "05": 3, "06": 5}  # at least


def read(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def text_of(cell):
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


def figures(notebook):
    return [base64.b64decode(o.data["image/png"]) for o in outputs(notebook) if "image/png" in o.get("data", {})]


def solved(notebook):
    """The notebook with each exercise once more below itself: the folded solution, then the check again."""
    cells = []
    for cell in notebook.cells:
        cells.append(cell)
        if "check" in cell.metadata.get("tags", []):
            check = cell
        if "solution" in cell.metadata.get("tags", []):
            (answer,) = re.findall(r"```python\n(.*?)\n```", cell.source, re.DOTALL)
            cells.append(nbformat.v4.new_code_cell(answer))
            cells.append(nbformat.v4.new_code_cell(check.source, metadata={"tags": ["solved"]}))
    return nbformat.v4.new_notebook(cells=cells, metadata=notebook.metadata)


def test_there_are_six():
    assert [path.name[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_its_solutions_are_right(path, monkeypatch, tmp_path):
    """In a copy of the project, for a notebook writes exercises beside itself."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "my_*", "counter.py")
    folder = shutil.copytree(ROOT, tmp_path / "project", ignore=left_out) / "notebooks"
    monkeypatch.setenv("ZERO_SMALL", "1")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    notebook = solved(read(path))
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbclient.NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(folder)}}).execute()
    assert not [o for o in outputs(notebook) if o.output_type == "error" or o.get("name") == "stderr"]
    assert len(figures(notebook)) >= FIGURES[path.name[:2]]
    tagged = {tag: [c for c in notebook.cells if tag in c.metadata.get("tags", [])] for tag in ("check", "solved")}
    assert len(tagged["check"]) == len(tagged["solved"]) >= 3
    for cell in tagged["check"]:
        assert "not solved yet" in text_of(cell)
    for cell in tagged["solved"]:
        assert ": right" in text_of(cell) and ": not " not in text_of(cell), text_of(cell)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored(path):
    notebook, text = read(path), path.read_text()
    assert len(text.encode()) < 1_000_000
    for cell in notebook.cells:  # all cells were run, from top to bottom
        if cell.cell_type == "code":
            assert cell.execution_count, cell.source[:80]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    stored = outputs(notebook)
    assert not [o for o in stored if o.output_type == "error" or o.get("name") == "stderr"]
    words = json.dumps(
        [{**o, "data": {k: v for k, v in o.get("data", {}).items() if "image" not in k}} for o in stored]
    )
    assert os.uname().nodename not in words and str(pathlib.Path.home()) + "/" not in words
    words += "".join(cell.source for cell in notebook.cells)
    assert "Warning" not in words and "WARNING" not in words
    assert not re.search(r"(?<![\w.:/])/(home|root|tmp|usr|work|Users|var|opt|mnt)/", words)
    pictures = figures(notebook)
    assert len(pictures) >= FIGURES[path.name[:2]]
    for png in pictures:  # a picture that is drawn, not an empty canvas
        width, height = struct.unpack(">II", png[16:24])
        assert width > 400 and height > 150 and len(png) > 5_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_figure_is_stored_for_every_cell_that_draws(path):
    for cell in read(path).cells:
        if cell.cell_type == "code" and re.search(r"^fig\b.* = ", cell.source, re.MULTILINE):
            assert any("image/png" in output.get("data", {}) for output in cell.outputs), cell.source
