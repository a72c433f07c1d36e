from launch import STAGES, complaints, losses, torchrun


def default_run(cache=[]):
    """The README's first command, through the real torchrun."""
    if not cache:
        cache.append(torchrun(STAGES[1], timeout=400))
    return cache[0]


def test_it_learns():
    values = losses(default_run())
    assert len(values) == 50
    assert 5.4 < values[0] < 5.8  # ln 256 = 5.55 knows nothing
    assert sum(values[-10:]) / 10 < 3.0


def test_no_warnings():
    assert default_run().status == 0 and not complaints(default_run())
