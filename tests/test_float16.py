"""The paper's own 16 bits: float16 with dynamic loss scaling, the same in all files."""

import pytest
from launch import STAGES, TINY, found, hashes, launch, losses, norms, tiny, with_all
from test_losses import assert_identical
from test_zero_r import zero_r

SCALES = ("--loss-scale", 2**10)  # TINY's gradients stay finite with it


def scales(run):
    return [step["loss_scale"] for step in run.records if step["event"] == "step"]


@pytest.mark.parametrize("ranks", [2, *with_all((1,), (3,), (4,))])
def test_stages_are_bit_identical(ranks):
    """With the default scale: it may be halved a few times first."""
    runs = [tiny(stage, ranks, dtype="float16") for stage in STAGES]
    assert_identical(runs)
    assert max(norm or 0 for norm in norms(runs[0])) > 1  # --clip acts
    assert norms(runs[0])[-1] and len(set(hashes(runs[0]))) == 2
    assert all(scales(run) == scales(runs[0]) for run in runs)


@pytest.mark.parametrize("ranks", [2, *with_all((1,), (3,), (4,))])
def test_stages_with_micro_batches(ranks):
    """Stages 0 and 1 sum micro-batches in fp32 and round once, to send the sum; stages 2 and 3 send every micro-batch's
    gradient and round each. So there are two results, as in bfloat16."""
    runs = [tiny(stage, ranks, dtype="float16", micro_batches=3) for stage in STAGES]
    assert_identical(runs[:2])
    assert_identical(runs[2:])
    assert losses(runs[2]) == pytest.approx(losses(runs[0]), rel=1e-2)


def test_stages_with_arithmetic_in_float16():
    assert_identical([tiny(stage, 2, dtype="float16", compute="float16") for stage in STAGES])


@pytest.mark.parametrize("config", ["full", *with_all(("C1",), ("C4",))])
def test_configurations_of_zero_r(config):
    assert_identical([zero_r(config, dtype="float16"), zero_r("none", dtype="float16")])


def test_its_losses_are_those_of_float32():
    assert losses(tiny(STAGES[3], 2, dtype="float16")) == pytest.approx(
        losses(tiny(STAGES[3], 2, dtype="float32")), rel=0.01
    )


@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
def test_nothing_else_is_scaled(dtype):
    assert set(scales(tiny(STAGES[0], 2, dtype=dtype))) == {1}


@pytest.mark.parametrize("stage", STAGES)
def test_the_scale_changes_no_bit(stage):
    """It is a power of two, so where nothing under- or overflows the weights are the same."""
    one, large = (
        launch("tests/drive.py", "coarse", stage, *TINY, "--dtype", "float16", "--loss-scale", scale, ranks=2)
        for scale in (1, 2**10)
    )
    assert set(scales(one)) == {1} and set(scales(large)) == {2**10}
    assert_identical([one, large])
    assert hashes(one)[0] != hashes(one)[1]


def test_a_gradient_of_1e_8_needs_the_scale():
    vanished, kept = (
        launch("tests/drive.py", "faint", STAGES[1], *TINY, "--dtype", "float16", "--loss-scale", scale, ranks=2)
        for scale in (1, 2**16)
    )
    assert set(norms(vanished)) == {0} and hashes(vanished)[0] == hashes(vanished)[1]
    assert 1e-8 < min(norms(kept)) < max(norms(kept)) < 1e-5 and hashes(kept)[0] != hashes(kept)[1]


@pytest.mark.parametrize("stage", (*STAGES, "zero_r.py"))
def test_an_overflow_on_one_rank(stage):
    """Every rank halves the scale and keeps everything as it was, and goes on."""
    options = [*TINY, "--dtype", "float16", "--steps", 5, *SCALES]
    run = launch("tests/drive.py", "spoil", stage, *options, ranks=2, env={"SPOILED": "2"})
    assert scales(run) == [2**10] * 3 + [2**9] * 2
    assert [step["skipped"] for step in run.of("step")] == [step == 2 for step in range(5)]
    told = {(told["step"], told["scale"], told["changed"]) for told in found(run)}  # on both ranks
    assert told == {(step, 2**10 if step < 3 else 2**9, step != 2) for step in range(5)}


def test_good_steps_double_it():
    assert scales(tiny(STAGES[1], dtype="float16", steps=6, loss_scale=1, loss_scale_window=2)) == [1, 1, 2, 2, 4, 4]


def test_ten_steps_in_a_row_at_the_floor_end_the_run():
    options = [*TINY, "--steps", 30, "--dtype", "float16", "--loss-scale", 4]
    run = launch(
        "tests/drive.py", "spoil", STAGES[2], *options, ranks=2, env={"SPOILED": " ".join(map(str, range(30)))}
    )
    (line,) = run.err.splitlines()
    assert run.status != 0 and "not finite in ten steps" in line
    assert scales(run) == [4, 2] + [1] * 10
