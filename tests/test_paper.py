"""What the paper says about memory, beside what the code does as rank 0 of up to 1024. See notebooks/paper.py.

By default a third of Table 1's cells, a row of Table 2, the examples of §3.2 and §6.1, and a trillion parameters; with
--all every cell and row, the figures, and the full sizes that otherwise are extrapolated from a few layers.
"""

import gc
import resource
import sys
import time

import pytest
from launch import ROOT, with_all

sys.path.insert(0, str(ROOT / "notebooks"))
import paper  # noqa: E402

gc.freeze()  # a simulation ends with gc.collect(), which need not walk through all of torch

pytestmark = pytest.mark.xdist_group("paper")  # its tests share simulations, kept in memory
CELLS = [(N, model, stage) for N in paper.TABLE_1 for model in paper.MODELS for stage in (1, 2, 3)]
# A third that has every row, column and model: of a row's three models each in another stage.
THIRD = [cell for number, cell in enumerate(CELLS) if (number + number // 3 + number // 9) % 3 == 0]
TABLE_1 = [*THIRD, *with_all(*(cell for cell in CELLS if cell not in THIRD))]
TABLE_2 = [16, *with_all(*((mp,) for mp in paper.TABLE_2 if mp != 16))]


@pytest.fixture(autouse=True)
def as_one_process(monkeypatch):
    """A simulation is for one process, whatever the shell that runs the tests says."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


# ---- Figure 1 and Table 1 ----


def test_a_third_is_representative():
    for part, number in ((0, 6), (1, 3), (2, 3)):
        assert len({cell[part] for cell in THIRD}) == number and len(THIRD) == 18


@pytest.mark.parametrize(("N", "model", "stage"), TABLE_1)
def test_table_1(N, model, stage):
    printed, unit = paper.printed(N, model, stage)
    assert paper.states(model, stage, N) == pytest.approx(printed, abs=unit)
    run = paper.simulate(paper.STAGES[stage], N, batch=1, context=16, **paper.MODELS[model])
    assert run["psi"] == pytest.approx(paper.PSI[model], rel=0.005)


def test_figure_1():
    for _, printed, ours in paper.figure_1():
        assert ours == pytest.approx(printed, abs=0.15 if printed == 120 else 0.05)


# ---- Table 2 ----


@pytest.mark.parametrize("mp", TABLE_2)
@pytest.mark.parametrize("column", paper.COLUMNS)
def test_table_2_states(column, mp):
    printed = paper.TABLE_2[mp][list(paper.COLUMNS).index(column)]
    # 0.5T, 1T and 2T are printed with one digit and are 512, 1024 and 2048: 4 x 128 and so on.
    printed *= 1.024 if printed in (500, 1000, 2000) else 1
    assert paper.largest(column, mp, "states") == pytest.approx(printed, rel=0.02)


@pytest.mark.parametrize("mp", TABLE_2)
@pytest.mark.parametrize(("column", "measured"), [("baseline", 4), ("P_os", 5)])
def test_table_2_measured(column, measured, mp):
    """What really fits is less than the states allow, and more than was measured with all that a real run has beside
    live tensors: what the allocator caches, the CUDA context, NCCL's buffers, a larger batch."""
    states, peak = (paper.largest(column, mp, what) for what in ("states", "peak"))
    assert paper.TABLE_2[mp][measured] < peak < states


@pytest.mark.slow
def test_the_peak_is_affine_in_the_layers():
    """A third run confirms the line through the two."""
    for column in ("baseline", "P_os+g+p"):
        four, eight, sixteen = (paper.table_2_run(column, 16, layers) for layers in (4, 8, 16))
        assert paper.line((4, 8), (four["peak"], eight["peak"]), 16) == pytest.approx(sixteen["peak"], rel=1e-3)
        update = [paper.at_the_update(run) for run in (four, eight, sixteen)]
        assert paper.line((4, 8), update[:2], 16) == pytest.approx(update[2], rel=1e-3)


# ---- §3.2 and §6.1 ----


def test_activations_of_gpt2():
    """Footnote 3's 12 elements a token and channel, in 16 bits, are the 60 GB. A block here keeps 16 of them. A
    checkpoint a block is 5 GB; the printed 8 need more."""
    ours, one = paper.gpt2_activations(), 32 * 1024 * 1600 * 2
    # Norm; queries, keys and values; attention; the sum with the input; norm; MLP; GELU; the sum that is the output.
    assert [tensor / one for tensor in paper.block_keeps() if tensor > one / 2] == [1, 3, 1, 1, 1, 4, 4, 1]
    assert sum(paper.block_keeps()) / one == pytest.approx(16, rel=0.01)
    assert ours["without checkpoints"] == pytest.approx(60 * 16 / 12, rel=0.02)
    assert ours["with checkpoints"] == 48 * 32 * 1024 * 1600 * 2 / 1e9 < paper.GPT2_PAPER["with checkpoints"]
    # Ψ is 1.64e9 here: the head has its own 50257 x 1600.
    assert ours["fp32 buffer"] == pytest.approx(6, rel=0.1)


def test_pa_of_the_100b_model():
    """The printed 33 GB are 33.5e9 elements: in 16 bits twice as many bytes, and a sixteenth of them with P_a."""
    ours = paper.pa_example()
    assert ours == {"C3": (67.108864, 0), "C4": (67.108864 / 16, 0), "C5": (0, 67.108864 / 16)}
    for config in ("C3", "C4"):
        assert ours[config][0] / 2 == pytest.approx(paper.PA_PAPER[config], abs=1)  # cut off, not rounded


# ---- Figures 6, 7 and 8 ----


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "batch"), [(50, 16), (125, 32)])
def test_differences_of_figure_7(layers, batch):
    for step, (ours, argued) in paper.differences(layers, batch).items():
        assert ours == pytest.approx(argued, rel=0.02), step


@pytest.mark.slow
def test_order_of_figure_7():
    C1, C2, C3, C4, C5 = (paper.peak(config, 50, 16) for config in paper.CONFIGS)
    assert C1 > C2 and C1 > C3 > C4 >= C5
    assert paper.differences(50, 16)["C1", "C3"][0] == pytest.approx(29.7 - 25.5, abs=0.7)  # read to 0.3 each


@pytest.mark.slow
def test_what_figure_7_does_not_say():
    """With a checkpoint every two layers its five bars hold about as much that our runs don't."""
    rest = paper.unexplained(every=2)
    assert 9 < min(rest.values()) and max(rest.values()) < 12, rest
    assert paper.unexplained()["C5"] == rest["C5"]  # which keeps none on the device


@pytest.mark.slow
def test_order_of_figure_6():
    C1, C2, C3, C4, C5 = (paper.largest_model(config) for config in paper.CONFIGS)
    assert C1 < C3 < C2 < C4 < C5  # 40B, 50B, 60B, 140B, 150B


@pytest.mark.slow
def test_batches_of_figure_8():
    ours = {config: paper.largest_batch(config) for config in paper.CONFIGS}
    assert ours["C1"] < ours["C2"] and ours["C1"] < ours["C3"] < ours["C4"] < ours["C5"]
    for config, batch in paper.FIGURE_8.items():
        assert ours[config] > batch, ours  # what the paper ran fits


@pytest.mark.slow
def test_more_gpus_allow_a_larger_batch_and_so_a_faster_step():
    """§10.3: the 60B model on 64 to 400 GPUs is super-linear with the batches of the paper, and not at a fixed one."""
    largest = [paper.largest_batch("C4", ranks=ranks) for ranks in paper.FIGURE_3]
    assert largest == sorted(largest) and largest[-1] / largest[0] == pytest.approx(2, rel=0.1)
    for ranks, batch, most in zip(paper.FIGURE_3, paper.FIGURE_3.values(), largest):
        assert batch < most, ranks  # what the paper ran fits

    def sequences_a_second(ranks, batch):  # of one replica
        return batch / sum(paper.step_of_60b(ranks, batch))

    start = sequences_a_second(64, 16)
    assert sequences_a_second(400, 16) < start < 1.05 * start < sequences_a_second(400, paper.FIGURE_3[400])


@pytest.mark.slow
def test_170b_needs_c5_most():
    """At batch 12 on 400 GPUs the paper ran only C5."""
    fits = {config: paper.largest_batch(config, 212, ranks=400) for config in paper.CONFIGS}
    assert fits["C5"] == max(fits.values()) > 12 and max(fits["C1"], fits["C3"]) < 12


@pytest.mark.slow
@pytest.mark.parametrize(("config", "layers", "batch"), [("C1", 50, 16), ("C4", 125, 32), ("C5", 125, 32)])
def test_extrapolated_peaks_are_those_of_full_runs(config, layers, batch):
    full = paper.zero_r(config, layers, batch)["peak"] / paper.GB
    assert paper.peak(config, layers, batch) == pytest.approx(full, rel=0.005)


@pytest.mark.slow
def test_an_extrapolated_peak_is_that_of_a_deeper_run():
    assert paper.peak("C4", 12, 16) == pytest.approx(paper.zero_r("C4", 12, 16)["peak"] / paper.GB, rel=0.005)


# ---- §9 and beyond ----


def test_a_trillion_on_1024():
    rank = paper.huge(paper.TRILLION)
    assert rank["states"] / paper.GB == pytest.approx(15.6 * 1.007, rel=0.02)  # 16 Ψ / 1024, our Ψ being 1.007e12
    assert rank["peak"] < 32e9
    # 3Ψ/16 elements of 2 bytes less the head's share: about a minute on the paper's network, whatever the batch.
    assert rank["data bytes"] == pytest.approx(2 * 3 * rank["psi"] * 63 / 64, rel=0.001)
    assert 55 < paper.seconds(rank["data bytes"], min(paper.NETWORKS.values())) < 65


@pytest.mark.slow
def test_ten_trillion():
    """Not on 1024 GPUs of 80 GB; on 4096."""
    assert paper.huge(paper.TEN_TRILLION)["states"] == pytest.approx(16 * 1e13 / 1024, rel=0.005)
    assert paper.huge(paper.TEN_TRILLION, ranks=4096)["peak"] < 80e9 < paper.huge(paper.TEN_TRILLION)["states"]


@pytest.mark.slow
def test_what_80_gb_change():
    """All that is proportional grows by 80/32, and the states of a trillion fit on 200 ranks in place of 500."""
    for column in paper.COLUMNS:
        on_80, on_32 = (paper.largest(column, 1, "states", limit) for limit in (80, 32))
        assert on_80 == pytest.approx(2.5 * on_32, rel=0.02)
    for limit, ranks in ((32, 500), (80, 200)):
        assert paper.states("1T", 3, ranks) <= limit + 0.01 < paper.states("1T", 3, ranks - 1)
    for config in paper.CONFIGS:
        assert 2.4 < paper.largest_model(config, limit=80) / paper.largest_model(config) < 2.7


@pytest.mark.slow
def test_a_trillion_takes_seconds_and_little_memory():
    """On two idle cores; a run on a busy machine says nothing."""
    paper.run_once.cache_clear()
    start = time.process_time()
    full = paper.zero_r("full", **paper.TRILLION, batch=1, ranks=1024)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 < 2e9  # Linux counts in KiB
    assert paper.huge(paper.TRILLION)["peak"] == pytest.approx(full["peak"], rel=0.01)
