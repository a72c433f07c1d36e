import sys

import formulas
import pytest
from launch import STAGES, found, launch, tiny


@pytest.mark.parametrize("micro_batches", (1, 3))
@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
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
    """The default model, since with tiny messages gloo's headers would count."""
    options = ["--batch", 1, "--steps", 2, "--compute", "float32", "--micro-batches", 2]
    run = launch("tests/drive.py", "wire", stage, *options, ranks=3)
    (record,) = run.of("communication")
    assert len(found(run)) == 2 * 3
    for step in found(run):
        assert step["sent"] == pytest.approx(record["bytes"], rel=0.03)
