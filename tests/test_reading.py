"""How much of a file is explanation, counted by the tokenizer, above the line "All below is the same"."""

import ast
import io
import tokenize

import pytest
from launch import ROOT, STAGES


def counted(text):
    """(lines of code, lines that are a comment alone, characters of prose, characters of code), without whitespace.
    Prose is comments and docstrings; a docstring's lines count neither as code nor as comments."""
    docstrings = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    code, comments, prose_size, code_size = set(), set(), 0, 0
    layout = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        size = len("".join(token.string.split()))
        if token.type == tokenize.COMMENT:
            prose_size += size
            comments.add(token.start[0])
        elif token.type == tokenize.STRING and token.start in docstrings:
            prose_size += size
        elif token.type not in layout:
            code_size += size
            code |= {*range(token.start[0], token.end[0] + 1)}
    return len(code), len(comments - code), prose_size, code_size


def test_the_counter():
    text = (
        '"""Doc."""\n# why\n# not\nx = 1  # so\ndef f():\n    """Two\n    lines."""\n    return (x,\n            x)\n'
    )
    assert counted(text) == (4, 2, 36, 21)


@pytest.mark.parametrize("script", STAGES)
def test_the_subject_is_explained(script):
    above, line, _ = (ROOT / script).read_text().partition("# ==== All below")
    assert line
    code, comments, prose, size = counted(above)
    assert comments >= 0.3 * code, f"{comments} comments in {code} lines of code"
    assert prose >= size


@pytest.mark.parametrize("script", [*STAGES, "zero_r.py"])
def test_lines_fit_beside_the_paper(script):
    assert [line for line in (ROOT / script).read_text().splitlines() if len(line) > 110] == []
