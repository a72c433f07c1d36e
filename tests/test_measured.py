"""The pages' tables of memory and traffic are what the stages do, and each stage saves memory that a user can use."""

import measure
import pytest
from launch import STAGES, with_all
from measure import shown

NEW = "run `python tests/measure.py --write`"
RANKS = [2, *with_all((4,))]


@pytest.mark.parametrize("N", RANKS)
@pytest.mark.parametrize("script", STAGES)
def test_the_table_shows_what_was_measured(script, N):
    assert measure.row(script, N) in shown("measured").splitlines(), NEW


def test_the_readme_shows_what_is_printed():
    assert shown("output") == measure.output(), NEW


@pytest.mark.parametrize("k", range(4))
def test_the_readme_shows_the_sizes_of_the_diffs(k):
    assert shown(f"diff {k}") == measure.lines_changed(k), NEW


@pytest.mark.parametrize("config", ["C5", *with_all(*((config,) for config in measure.CONFIGS if config != "C5"))])
def test_the_table_shows_what_zero_r_does(config):
    assert measure.zero_r_row(config) in shown("zero_r").splitlines(), NEW


@pytest.mark.parametrize("k", range(len(STAGES) - 1))
def test_the_peak_of_each_stage_is_below_that_of_the_stage_before(k):
    """The default model at N = 2, with all that the formula leaves out: gathered layers, activations, buffers."""
    before, after = (max(memory["peak"] for memory in measure.memory(script, 2)) for script in STAGES[k : k + 2])
    assert after < before


@pytest.mark.parametrize("N", RANKS)
@pytest.mark.parametrize("script", STAGES)
def test_every_rank_keeps_what_the_formula_says(script, N):
    """To the byte: no layer of the default model needs padding for these N."""
    for memory in measure.memory(script, N):
        assert memory["states"] == memory["formula"]
