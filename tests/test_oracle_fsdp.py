"""Stage 3 against an independent implementation of the same idea, torch.distributed.fsdp.fully_shard."""

import pytest
from launch import STAGES, TINY, launch, losses, norms


def test_losses_and_norms_are_those_of_fully_shard():
    """In fp32. The norms too, because Adam hardly minds a gradient that is twice what it should be."""
    options = [*TINY, "--steps", 20, "--dtype", "float32"]
    oracle, run = (launch(script, *options, ranks=2) for script in ("tests/oracle_fsdp.py", STAGES[3]))
    assert len(losses(oracle)) == 20 and min(norms(oracle)) > 1  # --clip acts in every step
    assert losses(run) == pytest.approx(losses(oracle), rel=1e-5)
    assert norms(run) == pytest.approx(norms(oracle), rel=1e-5)
