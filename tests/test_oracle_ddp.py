import pytest
from launch import STAGES, TINY, launch, losses, norms


@pytest.mark.parametrize("stage", STAGES)
def test_losses_are_those_of_distributed_data_parallel(stage):
    """In fp32, over 20 steps. The norms too: Adam hardly minds a gradient that is twice what it should be."""
    options = [*TINY, "--steps", 20, "--dtype", "float32"]
    oracle, run = launch("tests/oracle_ddp.py", *options, ranks=2), launch(stage, *options, ranks=2)
    assert len(losses(oracle)) == 20
    assert losses(run) == pytest.approx(losses(oracle), rel=1e-5)
    assert norms(run) == pytest.approx(norms(oracle), rel=1e-5)
