import pytest
from launch import STAGES, complaints, losses, torchrun, with_all


@pytest.mark.parametrize("steps", [8, *with_all((50,))])
def test_the_first_command_learns(steps):
    """The README's, through the real torchrun, and without a warning; 50 steps are its own number."""
    run = torchrun(STAGES[1], "--steps", steps, timeout=600)
    assert not complaints(run)
    values = losses(run)
    assert len(values) == steps
    assert 5.4 < values[0] < 6.0  # ln 256 = 5.55 knows nothing
    assert sum(values[-5:]) / 5 < (4.5 if steps == 8 else 3.0)
