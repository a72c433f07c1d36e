"""Random configurations: `pytest tests/test_fuzz.py --fuzz 200` tries more than the two of the default suite.

A test's name is seed/number, and the seed is the day unless `--fuzz-seed` says otherwise: with it and `-k number` one
that has failed is repeated.
"""

import random

import formulas
import pytest
import test_zero_r
from launch import STAGES, launch, losses, norms
from test_losses import assert_identical


def pytest_generate_tests(metafunc):
    seed, fuzz = (metafunc.config.getoption(name) for name in ("--fuzz-seed", "--fuzz"))
    kind = ("test_stages", "test_zero_r_and_stage_3").index(metafunc.function.__name__)
    metafunc.parametrize("seed", [f"{seed}/{number}" for number in range(kind, fuzz, 2)])


def configuration(choose):
    """What all scripts are given alike; `ranks` is not an option."""
    heads = choose.randint(1, 4)
    return {
        "ranks": choose.randint(1, 4),
        "layers": choose.randint(1, 4),
        "heads": heads,
        "width": heads * choose.randint(1, 12),
        "context": choose.randint(1, 24),
        "vocab": choose.randint(256, 300),
        "batch": choose.randint(1, 3),
        "micro_batches": choose.choice((1, 1, 2, 3)),
        "steps": 3,
        "warmup": choose.randint(0, 3),
        "clip": choose.choice((0.01, 1, 1e6)),
        "seed": choose.randint(-10, 10),
        "dtype": choose.choice(("bfloat16", "float16", "float32")),
        "compute": choose.choice(("float32", "float32", "bfloat16", "float16")),
        "collectives": choose.choice(("gloo", "native")),
        "overlap": choose.choice(("on", "off")),
    }


def run(script, ranks, **options):
    flags = ([f"--{name.replace('_', '-')}", value] for name, value in options.items())
    return launch(script, *(part for pair in flags for part in pair), ranks=ranks)


def check_bytes_and_elements(run, stage, sizes):
    """What a rank keeps and sends is what the formulas say of padded layers."""
    (config,), (sent,) = run.of("config"), run.of("communication")
    multiple = 16 * config["world_size"]
    padded = [-(-size // multiple) * multiple for size in sizes]
    expected = formulas.states(stage, config, padded)
    for record in run.of("memory"):
        assert {name: record[name] for name in expected} == expected
    assert sent["elements"] == sum(formulas.elements(stage, config, padded)) and config["psi"] == sum(sizes)


def test_stages(seed):
    """Equal bits; with micro-batches stages 0 and 1, and stages 2 and 3 (test_losses.py says why)."""
    options = configuration(random.Random(seed))
    print(options)  # shown when it fails
    runs = [run(stage, **options) for stage in STAGES]
    assert_identical(runs[:2])
    assert_identical(runs[2:] if options["micro_batches"] > 1 else runs)
    for stage, ended in enumerate(runs):
        check_bytes_and_elements(ended, stage, formulas.layer_sizes(ended.of("config")[0]))


def test_zero_r_and_stage_3(seed):
    """Its switches change no bit, but P_os sums micro-batches before the reduction; in fp32 it is stage 3 to 1e-5."""
    choose = random.Random(seed)
    options = configuration(choose)
    ranks, width, heads = (options[name] for name in ("ranks", "width", "heads"))
    mp = choose.choice([M for M in range(1, 5) if ranks % M == width % M == heads % M == 0])
    switches = {
        "mp": mp,
        "config": choose.choice(test_zero_r.CONFIGS),
        "buffer_elements": 16 * ranks * choose.randint(1, 99),
    }
    for switch, values in (("partition", ("os", "os+g", "os+g+p")), ("pa", ("off", "on", "cpu"))):
        switches[switch] = choose.choice(("auto", *values))
    for switch in ("cb", "md"):
        switches[switch] = choose.choice(("auto", "off", "on"))
    print(options | switches)
    zero_r = run("zero_r.py", **options, **switches)
    (config,) = zero_r.of("config")
    alone = {"mp": mp, "config": "none", "partition": "os" if config["partition"] == "os" else "os+g+p"}
    assert_identical([zero_r, run("zero_r.py", **options, **alone)])
    stage = ("", "os", "os+g", "os+g+p").index(config["partition"])
    check_bytes_and_elements(zero_r, stage, test_zero_r.layer_sizes(config))
    if (options["dtype"], options["compute"]) == ("float32", "float32"):
        stage_3 = run(STAGES[3], **options | {"ranks": ranks // mp})
        assert losses(zero_r) == pytest.approx(losses(stage_3), rel=1e-5)
        assert norms(zero_r) == pytest.approx(norms(stage_3), rel=1e-5)
