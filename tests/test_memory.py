import formulas
import pytest
from launch import STAGES, TINY, found, launch, tiny, with_all


@pytest.mark.parametrize(
    ("ranks", "dtype", "micro_batches"),
    [
        *((ranks, "bfloat16", 1) for ranks in (1, 2, 3, 4)),
        *((2, "float32", 1), (2, "float16", 1), (3, "bfloat16", 3), (3, "float32", 3)),
        *with_all((1, "float32", 1), (3, "float32", 1), (4, "float32", 1), (3, "float16", 1)),
        *with_all((1, "bfloat16", 3), (2, "bfloat16", 3), (4, "bfloat16", 3)),
    ],
)
@pytest.mark.parametrize("stage", range(4))
def test_states_are_those_of_the_formula(stage, ranks, dtype, micro_batches):
    run = tiny(STAGES[stage], ranks, dtype=dtype, micro_batches=micro_batches)
    (config,) = run.of("config")
    sizes, padded = formulas.layer_sizes(config), formulas.padded_sizes(config)
    assert config["psi"] == sum(sizes) and config["world_size"] == ranks
    assert [record["rank"] for record in run.of("memory")] == list(range(ranks))
    expected = formulas.states(stage, config, padded)
    for record in run.of("memory"):
        assert {category: record[category] for category in expected} == expected  # to the byte
        assert record["states"] == sum(expected.values())
        assert record["formula"] == pytest.approx(sum(formulas.states(stage, config, sizes).values()), rel=1e-12)
        assert record["peak"] == sum(record["at_peak"].values()) > record["states"]


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_optimizer_states_are_a_share(ranks):
    whole, *shares = [tiny(stage, ranks).of("memory")[0]["optimizer"] for stage in STAGES]
    assert [share * ranks for share in shares] == [whole] * 3


@pytest.mark.parametrize("micro_batches", (1, 3))
@pytest.mark.parametrize("stage", (2, 3))
def test_at_most_two_layers_are_whole(stage, micro_batches):
    """At any time of the step, not just at the marks: of gradients in stages 2 and 3, of parameters in stage 3."""
    options = [*TINY, "--layers", 5, "--steps", 2, "--micro-batches", micro_batches]
    run = launch("tests/drive.py", "trace", STAGES[stage], *options, ranks=3)
    (config,) = run.of("config")
    padded = formulas.padded_sizes(config)
    own, two_layers = formulas.states(stage, config, padded), 2 * sum(sorted(padded)[-2:])  # bytes, bf16
    assert len(found(run)) == 3
    for rank in found(run):
        assert own["gradients"] < rank["most"]["gradients"] <= own["gradients"] + two_layers
        assert rank["most"].get("gathered", 0) == (2 if stage == 3 else 0)
        assert rank["most"]["parameters"] <= own["parameters"] + (two_layers if stage == 3 else 0)


@pytest.mark.parametrize("ranks", (1, 3))
def test_no_layer_is_whole_between_steps(ranks):
    run = tiny(STAGES[3], ranks)
    (config,) = run.of("config")
    own = formulas.states(3, config, formulas.padded_sizes(config))
    after = {"before the optimizer step", "norm", "fp32 gradients", "Adam", "parameters updated"}
    moments = [moment for moment in run.of("timeline") if moment["label"] in after]
    assert len(moments) == ranks * len(after)
    assert {moment["parameters"] for moment in moments} == {own["parameters"]}


@pytest.mark.parametrize("stage", STAGES)
def test_peak_is_what_the_profiler_sees(stage):
    """On a model large enough that gloo's small buffers, which the meter doesn't count, don't matter."""
    options = "--layers 3 --width 192 --context 64 --batch 4 --steps 2 --compute float32".split()
    run = launch("tests/drive.py", "profile", stage, *options, ranks=2)
    for rank, record in zip(found(run), run.of("memory"), strict=True):
        assert record["peak"] == pytest.approx(rank["peak"], rel=0.01)
