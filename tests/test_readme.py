"""What the README says is so: its commands, its numbers, and the places it points to."""

import ast
import re

import pytest
from launch import ROOT, STAGES, launch
from test_diffs import diff

README = (ROOT / "README.md").read_text()
FILES = (*STAGES, "zero_r.py")


def test_two_commands_do_everything():
    commands = re.findall(r"^    (pip install -r requirements.txt && .*)$", README, re.MULTILINE)
    assert len(commands) == 2 and "torchrun" in commands[0] and "pytest" in commands[1]


@pytest.mark.parametrize("k", range(4))
def test_sizes_of_the_diffs(k):
    one, two = FILES[k], FILES[k + 1]
    added, removed, _ = diff(one, two, "--numstat").split(maxsplit=2)
    assert f"`git diff --no-index {one} {two}` | <!-- diff {k} -->{int(added) + int(removed)}<!-- --> |" in README


def test_what_it_points_to_is_there():
    for path in re.findall(r"\]\((?!http)([^)]+)\)", README) + re.findall(r"`(\w+\.ipynb)`", README):
        assert (ROOT / path).exists() or (ROOT / "notebooks" / path).exists(), path
    for script, options in re.findall(r"^    (?:torchrun .*?|python )(\w+\.py)(.*)$", README, re.MULTILINE):
        source = (ROOT / script).read_text()
        for option in re.findall(r" --([\w-]+)", options):
            assert f"    {option.replace('-', '_')}: " in source, (script, option)


def test_the_table_of_sections_names_what_exists():
    rows = re.findall(r"^\| (§[^|]*)\|[^|]*\| `(\w+\.py)` \|([^|]*)\|$", README, re.MULTILINE)
    assert len(rows) >= 9
    for section, script, where in rows:
        source = (ROOT / script).read_text()
        names = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in re.findall(r"`([\w.]+)`", where):
            assert set(name.split(".")) <= names, (script, name)
        for number in re.findall(r"§[\d.]+\d", section):
            assert number in source, (script, number)


@pytest.mark.parametrize("script", FILES)
def test_help_reads_as_a_page(script):
    run = launch(script, "--help", log=False)
    assert run.status == 0 and run.err == ""
    options = re.findall(r"^    (\w+): \w+ = option\(", (ROOT / script).read_text(), re.MULTILINE)
    assert len(options) >= 20
    for option in options:
        assert re.search(rf"^  --{option.replace('_', '-')}\b", run.out, re.MULTILINE), option
    assert "§" in run.out and "torchrun --standalone" in run.out
