"""The README's table of memory and traffic is what the stages do, and each stage saves memory that a user can use."""

import re

import measure
import pytest
from launch import ROOT, STAGES

SHOWN = [("output", measure.output), ("measured", measure.table), ("zero_r", measure.zero_r_table)]


@pytest.mark.parametrize(("name", "table"), SHOWN)
def test_the_readme_shows_what_was_measured(name, table):
    _, shown, _ = re.split(f"<!-- /?{name} -->", (ROOT / "README.md").read_text())
    assert shown.strip("\n") == table(), "replace it by what `python tests/measure.py` prints"


@pytest.mark.parametrize("k", range(len(STAGES) - 1))
def test_the_peak_of_each_stage_is_below_that_of_the_stage_before(k):
    """The default model at N = 4, with all that the formula leaves out: gathered layers, activations, buffers."""
    before, after = (max(memory["peak"] for memory in measure.memory(script, 4)) for script in STAGES[k : k + 2])
    assert after < before


@pytest.mark.parametrize("N", measure.RANKS)
@pytest.mark.parametrize("script", STAGES)
def test_every_rank_keeps_what_the_formula_says(script, N):
    """To the byte: no layer of the default model needs padding for these N."""
    for memory in measure.memory(script, N):
        assert memory["states"] == memory["formula"]
