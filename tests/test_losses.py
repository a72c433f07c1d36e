"""Sharding changes where numbers are kept, and never what they are."""

import pytest
from launch import STAGES, hashes, losses, norms, tiny, with_all


def assert_identical(runs):
    for run in runs[1:]:
        assert losses(run) == losses(runs[0])
        assert norms(run) == norms(runs[0])
        assert hashes(run) == hashes(runs[0])


def assert_close(run, expected):
    """The norms too: Adam hardly minds a gradient that is twice what it should be."""
    assert losses(run) == pytest.approx(losses(expected), rel=1e-5)
    assert norms(run) == pytest.approx(norms(expected), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "dtype", "collectives"),
    [
        *((ranks, "bfloat16", "gloo") for ranks in (1, 2, 3, 4)),
        *((2, "float32", "gloo"), (2, "float32", "native")),
        *with_all(
            *((ranks, "float32", "gloo") for ranks in (1, 3, 4)),
            *((1, "bfloat16", "native"), (3, "bfloat16", "native"), (4, "float32", "native")),
        ),
    ],
)
def test_stages_are_bit_identical(ranks, dtype, collectives):
    runs = [tiny(stage, ranks, dtype=dtype, collectives=collectives) for stage in STAGES]
    assert_identical(runs)
    assert len(losses(runs[0])) == 4 and None not in losses(runs[0])
    assert max(norms(runs[0])) > runs[0].of("config")[0]["clip"]
    # The weights begin the same, whatever the number of ranks and the dtype, and don't stay so.
    start, end = hashes(runs[0])
    assert hashes(tiny(STAGES[0]))[0] == start != end


@pytest.mark.parametrize(
    ("ranks", "dtype"), [(3, "bfloat16"), (3, "float32"), *with_all((1, "bfloat16"), (2, "bfloat16"), (4, "bfloat16"))]
)
def test_stages_with_micro_batches(ranks, dtype):
    """Stages 0 and 1 sum micro-batches before the reduction and stages 2 and 3 after it: two ways to round."""
    runs = [tiny(stage, ranks, dtype=dtype, micro_batches=3) for stage in STAGES]
    assert_identical(runs[:2])
    assert_identical(runs[2:])
    if dtype == "float32":
        assert_close(runs[2], runs[0])


@pytest.mark.parametrize("stage", STAGES)
def test_one_global_batch_however_it_is_divided(stage):
    """1 rank x 8, 4 ranks x 2, and 4 micro-batches x 2."""
    whole = tiny(stage, dtype="float32", batch=8)
    assert_close(tiny(stage, 4, dtype="float32"), whole)
    assert_close(tiny(stage, dtype="float32", micro_batches=4), whole)


@pytest.mark.parametrize("stage", STAGES)
def test_overlap_changes_nothing(stage):
    """A buffer that is reused or freed while it travels would."""
    on, off = tiny(stage, 3, micro_batches=3), tiny(stage, 3, micro_batches=3, overlap="off")
    assert_identical([on, off])
    assert off.of("timeline")[-1]["ms"] < 4000  # the meter never waited in vain for gloo to let go of a tensor
