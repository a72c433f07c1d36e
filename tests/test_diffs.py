"""A step of the ladder shows what its section of the paper adds, and nothing else."""

import ast
import re
import subprocess

import pytest
from launch import ROOT, STAGES

STEPS = list(zip(STAGES, STAGES[1:], (65, 55, 60)))  # the most lines that may change, added plus removed
# What a stage may have of its own, in sections 4 and 5. All the rest is the same in every file.
DIFFERENT = {"Layer.__init__", "named_states", "full_master", "paper_states", "paper_volume", "train_step"}


def sections(stage):
    """{heading: text}. The docstring comes first, under its own name."""
    docstring, *rest = re.split(r"^(# ---- \d\. .*)$", (ROOT / stage).read_text(), flags=re.MULTILINE)
    return {"docstring": docstring} | dict(zip(rest[::2], rest[1::2]))


def definitions(section):
    """{name: text} of the functions and methods of a section, and what is left of it without them."""
    found, rest, lines = {}, section, section.splitlines(keepends=True)
    for node in ast.parse(section).body:
        for inner in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(inner, ast.FunctionDef):
                name = inner.name if inner is node else f"{node.name}.{inner.name}"
                found[name] = "".join(lines[inner.lineno - 1 : inner.end_lineno])  # with the comment on its last line
                rest = rest.replace(found[name], f"<{name}>\n")
    return found, rest


@pytest.mark.parametrize("stage", STAGES[1:])
def test_shared_sections_are_equal(stage):
    first, other = sections(STAGES[0]), sections(stage)
    assert list(first) == list(other) and len(first) == 9
    for heading in first:
        if re.search(" [45]. ", heading):
            (one, one_rest), (two, two_rest) = definitions(first[heading]), definitions(other[heading])
            # The same names in the same order, the same comments between them, but for the rows of the timeline.
            one_rest, two_rest = (
                re.sub(r"^#     all-gather .*\n", "", rest, flags=re.M) for rest in (one_rest, two_rest)
            )
            assert one_rest == two_rest
            assert {name for name in one if one[name] != two[name]} <= DIFFERENT
        elif heading != "docstring":
            assert other[heading] == first[heading]


def diff(one, two, *options):
    command = ["git", "-c", "core.quotepath=off", "diff", "--no-index", "--no-color", *options, one, two]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8").stdout


@pytest.mark.parametrize(("one", "two", "most"), STEPS)
def test_steps_are_small(one, two, most):
    added, removed, _ = diff(one, two, "--numstat").split(maxsplit=2)
    assert 0 < int(added) + int(removed) <= most


@pytest.mark.parametrize(("one", "two"), [*zip(STAGES, (*STAGES[1:], "zero_r.py"))])
def test_hunks_name_their_section(one, two):
    docstring_ends = len(sections(two)["docstring"].splitlines())
    hunks = re.split(r"^@@ -\S+ \+(\d+)\S* @@.*\n", diff(one, two), flags=re.MULTILINE)[1:]
    hunks = [text for line, text in zip(hunks[::2], hunks[1::2]) if int(line) > docstring_ends]
    assert hunks
    for text in hunks:
        assert re.search(r"^[-+].*§\d", text, flags=re.MULTILINE), text
