import formulas
import pytest
from launch import STAGES, tiny, with_all


@pytest.mark.parametrize("ranks", [1024, *with_all((64,))])
@pytest.mark.parametrize("stage", range(4))
def test_states_are_those_of_the_formula(stage, ranks):
    """With 1024 ranks a layer is smaller than 16·N, so that part of the ranks own nothing but padding."""
    run = tiny(STAGES[stage], simulate_ranks=ranks, collectives="auto")
    (config,), (record,), (sent,) = run.of("config"), run.of("memory"), run.of("communication")
    padded = formulas.padded_sizes(config)
    assert config["world_size"] == ranks and (min(padded) == max(padded) == 16 * ranks) == (ranks == 1024)
    expected = formulas.states(stage, config, padded)
    assert {category: record[category] for category in expected} == expected
    assert sent["elements"] == sum(formulas.elements(stage, config, padded))


@pytest.mark.parametrize("ranks", [2, *with_all((4,))])
@pytest.mark.parametrize("stage", STAGES)
def test_a_simulation_measures_what_a_run_does(stage, ranks):
    real, simulated = tiny(stage, ranks), tiny(stage, simulate_ranks=ranks)
    one, other = ({**run.of("memory")[0], "clock_ms": None} for run in (simulated, real))
    assert one == other  # of rank 0: every category, at both moments, to the byte
    (real_sent,), (simulated_sent,) = real.of("communication"), simulated.of("communication")
    assert simulated_sent["collectives"] == real_sent["collectives"]
