import sys

import formulas
import pytest
from launch import STAGES, found, launch, tiny, with_all


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 1), (2, 1), (3, 1), (4, 1), (3, 3), *with_all((1, 3), (2, 3), (4, 3))]
)
@pytest.mark.parametrize("stage", range(4))
def test_elements_are_those_of_the_formula(stage, ranks, micro_batches):
    run = tiny(STAGES[stage], ranks, micro_batches=micro_batches)
    (config,), (record,) = run.of("config"), run.of("communication")
    sizes, padded = formulas.layer_sizes(config), formulas.padded_sizes(config)
    reduced, gathered = formulas.elements(stage, config, padded)
    sent = record["collectives"]
    assert (sent["reduce_scatter"]["elements"], sent["all_gather"]["elements"]) == (reduced, gathered)  # exactly
    assert record["elements"] == reduced + gathered and record["bytes"] == 2 * record["elements"]
    assert record["formula"] == pytest.approx(sum(formulas.elements(stage, config, sizes)), rel=1e-12)
    assert record["psi"] == sum(sizes) and sent["scalars"]["elements"] <= 3  # the loss and the norm, apart


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux' counters of a socket")
@pytest.mark.parametrize("stage", STAGES)
def test_the_kernel_counts_the_same(stage):
    """3.3 million parameters, since with tiny messages gloo's headers would count."""
    options = "--layers 4 --width 256 --heads 4 --batch 1 --steps 2 --micro-batches 2".split()
    run = launch("tests/drive.py", "wire", stage, *options, ranks=3)
    (record,) = run.of("communication")
    assert len(found(run)) == 2 * 3
    for step in found(run):
        assert step["sent"] == pytest.approx(record["bytes"], rel=0.03)
