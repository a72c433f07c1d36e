"""The faults of notebooks/faults.py, planted: each shows what is said of it, and the tests of this suite see it.

Most of them train: nothing crashes, the loss falls, and so nobody looks. That is why the other tests compare bits,
bytes and hashes rather than curves. Here each is given a copy of a stage file with the fault in it, and has to fail.
"""

import dataclasses
import sys
from functools import partial

import pytest
import test_losses
import test_memory
import test_volume
from launch import ROOT, STAGES

sys.path.append(str(ROOT / "notebooks"))

import faults  # noqa: E402

same_bits = partial(test_losses.test_stages_are_bit_identical, 2, "bfloat16", "gloo")  # losses, norms, weights
same_with_micro_batches = partial(test_losses.test_stages_with_micro_batches, 3, "float32")
two_whole_gradients = partial(test_memory.test_at_most_two_layers_are_whole, 2, 1)
two_whole_layers = partial(test_memory.test_at_most_two_layers_are_whole, 3, 1)
volume = partial(test_volume.test_elements_are_those_of_the_formula, 1, 2, 1)

CAUGHT = {  # fault -> the test that fails
    "no averaging": same_bits,
    "a wait() dropped": same_bits,
    "norm from the own shard only": same_bits,
    "shard overwritten, not accumulated": same_with_micro_batches,
    "full gradient kept alive": two_whole_gradients,
    "parameters not released": two_whole_layers,
    "gather after the step forgotten": volume,
    "wrong slice offset": same_bits,
    "masters rebuilt from the 16-bit parameters": same_bits,
    "seed depends on the number of ranks": same_bits,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", [*faults.FAULTS, faults.SILENT], ids=lambda fault: fault.name)
def test_fault_shows_what_is_said_of_it(fault):
    """The matrix of notebook 6."""
    assert faults.shows(*faults.planted(fault)) == fault.shows.split()


@pytest.mark.slow
@pytest.mark.parametrize("fault", faults.FAULTS[18:], ids=lambda fault: fault.name)
def test_fault_shows_nothing_on_two_ranks(fault):
    assert faults.shows(*faults.planted(dataclasses.replace(fault, ranks=2))) == []


def test_there_are_twenty():
    assert len({fault.name for fault in faults.FAULTS}) == len(faults.FAULTS) == 20
    assert all(fault.shows for fault in faults.FAULTS)
    assert {*CAUGHT} < {fault.name for fault in faults.FAULTS}


@pytest.mark.parametrize("name", CAUGHT)
def test_fault_is_caught(name, tmp_path, monkeypatch):
    (fault,) = (fault for fault in faults.FAULTS if fault.name == name)
    test = CAUGHT[name]
    test()  # passes with the files as they are
    broken = tmp_path / fault.file
    broken.write_text(fault.text())
    stages = [str(broken) if stage == fault.file else stage for stage in STAGES]
    monkeypatch.setattr(sys.modules[test.func.__module__], "STAGES", stages)
    with pytest.raises((AssertionError, KeyError)) as failure:  # KeyError: there is no count of what was never called
        test()
    # It ran to its end: the test sees what it did, not a typing error.
    assert not any(word in str(failure.value) for word in ("exit status", "Traceback"))
