"""The checks of the exercises in notebooks 1, 3, 4 and 5: a wrong answer is refused in one line, a right one accepted.

The cell of a check is run as it stands in the notebook, with the answer's names set, and with the little that it reads
of the cells above it.
"""

import contextlib
import fractions
import io
import json
import math
import sys
import types

import pytest
from launch import ROOT

sys.path.insert(0, str(ROOT / "notebooks"))
import lesson  # noqa: E402
import paper  # noqa: E402


@pytest.fixture(autouse=True)
def as_one_process(monkeypatch):
    """A simulation is for one process, whatever the shell that runs the tests says."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def check_cell(number, exercise):
    """The source of the check of an exercise."""
    (path,) = (ROOT / "notebooks").glob(f"{number}_*.ipynb")
    cells = json.loads(path.read_text())["cells"]
    checks = ["".join(cell["source"]) for cell in cells if "check" in cell["metadata"].get("tags", [])]
    return checks[exercise - 1]


def verdict(number, exercise, **names):
    """What the check prints, with these names set."""
    out = io.StringIO()
    tools = {"lesson": lesson, "paper": paper} | {name: value for name, value in vars(lesson).items() if name[0] != "_"}
    with contextlib.redirect_stdout(out):
        exec(check_cell(number, exercise), tools | names)
    return out.getvalue()


def said(*arguments, function=lesson.check_function, **more):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments, **more)
    return out.getvalue()


# ---- What all checks share ----


def test_an_answer_for_nothing_measured():
    """A factor of zero is none: the line names the numbers, and no ZeroDivisionError."""
    line = said(lambda x: 3, [((1,), 0)], "an exercise", usual={2: "twice"})
    assert "not yet" in line and line.count("\n") == 1


def test_no_cases_are_no_answer():
    assert "right" not in said(lambda x: x, [], "an exercise")


@pytest.mark.parametrize("options", [{"simulate_ranks": 64}, {"simulate-ranks": 64}, {"device": "cpu"}, {"layers": 1}])
def test_what_shall_stay_as_it_is(options):
    run, wrong = lesson.tried("zero_r.py", options, ranks=8, layers=2, width=32, heads=4, context=8, batch=1)
    assert run is None and "shall stay" in wrong


# ---- Notebook 1 ----


def small(layers, width, context, batch):
    """A stand-in for a run, with the tokens that are left before the optimizer step."""
    config = {"layers": layers, "width": width, "context": context, "batch": batch}
    memory = {"activations": 16 * batch * context}
    return types.SimpleNamespace(config=config, one=lambda *_: memory, of=lambda *_, **__: [])


def after_forward(run):
    c = run.config
    return 2 * c["batch"] * c["context"] * c["width"] * (c["layers"] + 1) + run.one("memory")["activations"]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (lambda layers, width, context, batch: 2 * batch * context * width * (layers + 1), True),
        (lambda layers, width, context, batch: 2 * batch * 64 * 384 * 9, False),  # only the batch is read
        (lambda layers, width, context, batch: 2 * batch * context * width * layers, False),
    ],
)
def test_kept_inputs_in_notebook_1(answer, right):
    runs = {"stage0": small(8, 384, 64, 4), "twice": small(8, 384, 64, 128)}
    fake = {"simulate": lambda *_, **shape: small(**{k: shape[k] for k in ("layers", "width", "context", "batch")})}
    line = verdict("01", 2, **runs, **fake, after_forward=after_forward, MODEL={"layers": 8}, kept_inputs=answer)
    assert (": right" in line) == right and line.count("\n") == 1


@pytest.mark.parametrize(
    ("K", "lines"),
    [
        ({"SGD": 4, "SGD with momentum": 8, "Adam": 12}, ["right"] * 3),
        ([4, 8, 12], ["right"] * 3),
        ({"SGD": 4, "Adam": 16}, ["right", "not solved yet", "not yet"]),
        (12, ["not solved yet"] * 3),
    ],
)
def test_K_in_notebook_1(K, lines):
    import torch

    said = verdict("01", 4, K=K, torch=torch).splitlines()
    assert len(said) == 3 and all(words in line for words, line in zip(lines, said)), said


# ---- Notebook 3 ----


def kept_inputs(layers, width, context, batch, M, pa):
    whole = 2 * batch * context * width * layers
    return {"off": whole, "on": whole // M, "cpu": 0}[pa]


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (kept_inputs, True),
        (lambda layers, width, context, batch, M, pa: 2 * batch * context * width * layers // M, False),
    ],
)
def test_kept_inputs_in_notebook_3(answer, right):
    """Among the cases is P_a+cpu, which keeps nothing on the device."""

    def run(mp, pa):
        config = {"layers": 6, "width": 128, "context": 64, "batch": 4, "mp": mp, "pa": pa}
        memory = {"kept": kept_inputs(6, 128, 64, 4, mp, pa)}
        return types.SimpleNamespace(config=config, one=lambda *_: memory)

    runs = {pa: run(2, pa) for pa in ("on", "cpu")}
    line = verdict("03", 1, runs=runs, kept_inputs=answer)
    assert (": right" in line) == right and line.count("\n") == 1


@pytest.mark.parametrize(
    ("without_pa", "with_pa", "right"),
    [(67.1, 4.2, 2), (67, 4, 2), (66, 4.3, 0), (68, 4.1, 0), (33.5, 2.1, 0)],
)
def test_the_example_of_100b_in_notebook_3(without_pa, with_pa, right):
    kept = {"off": 32 * 1024 * 8192 * 2, "on": 32 * 1024 * 8192 * 2 // 16}
    fake = lambda *_, pa, **__: types.SimpleNamespace(one=lambda *_: {"kept": kept[pa]})  # noqa: E731
    lines = verdict("03", 2, simulate=fake, without_pa=without_pa, with_pa=with_pa)
    assert lines.count(": right") == right and lines.count("\n") == 2


# ---- Notebook 4 ----


def states_of(k):
    return types.SimpleNamespace(one=lambda *_: {"states": (2 + 14 / 8) * 12 * 8192**2 * k})


@pytest.mark.parametrize(("blocks", "right", "word"), [(7, True, ""), (8, False, "GB"), (3000, False, "too many")])
def test_blocks_in_notebook_4(blocks, right, word):
    """Of thousands of blocks nothing is run."""

    def simulate(*_, layers, **__):
        assert layers < 50, "this would run for minutes"
        return states_of(layers)

    line = verdict("04", 4, simulate=simulate, blocks=blocks)
    assert (": right" in line) == right and word in line and line.count("\n") == 1


@pytest.mark.parametrize(("ranks", "right", "word"), [(200, True, ""), (187, False, "2³⁰"), (199, False, "too few")])
def test_ranks_in_notebook_4(ranks, right, word):
    fake = types.SimpleNamespace(states=lambda model, stage, n: 16_000 / n)
    line = verdict("04", 2, paper=fake, ranks=ranks)
    assert (": right" in line) == right and word in line and line.count("\n") == 1


# ---- Many answers ----
# For each exercise that a function or a number answers: what its check reads of the cells above, right answers, and
# wrong ones of its own. Each also gets WRONG_RESULTS, and what is no answer at all.


def stand_in(**memory):
    """A run whose records are these."""
    return types.SimpleNamespace(one=lambda *_: memory, **memory)


def states(stage, psi, n):
    return 2 * psi / (n if stage >= 3 else 1) + 2 * psi / (n if stage >= 2 else 1) + 12 * psi / (n if stage >= 1 else 1)


def run_of_states(stage, n, psi):
    return {"psi": psi, "states": states(stage, psi, n)}


SHAPES = [(8, 384, 64, 4), (8, 384, 64, 128), (3, 96, 24, 5)]
KEPT = [small(*shape) for shape in SHAPES]
PSIS = (50_000, 99_000)
MANY = {stage: [(n, stand_in(**run_of_states(stage, n, 7_000_000))) for n in (1, 2, 4)] for stage in range(4)}
R = [(2, "on"), (2, "cpu"), (4, "on"), (1, "off")]


def run_of_zero_r(M, pa):
    config = {"layers": 6, "width": 128, "context": 64, "batch": 4, "mp": M, "pa": pa}
    return types.SimpleNamespace(config=config, one=lambda *_: {"kept": kept_inputs(6, 128, 64, 4, M, pa)})


def per_parameter(stage, n):
    return [16, 4 + 12 / n, 2 + 14 / n, 16 / n][stage]


FUNCTIONS = {
    ("01", 1, "states_float32"): (
        {"simulate": lambda *_, layers, **__: stand_in(psi=PSIS[layers - 1], states=20 * PSIS[layers - 1])},
        {
            "the sum": lambda psi: (4 + 4 + 12) * psi,
            "a float": lambda psi: 20.0 * psi,
            "a fraction": lambda psi: fractions.Fraction(20) * psi,
            "in fp32 words": lambda psi: 4 * 5 * psi,
        },
        {
            "16-bit": lambda psi: 16 * psi,
            "no optimizer": lambda psi: 8 * psi,
            "optimizer alone": lambda psi: 12 * psi,
            "with fp32 gradients": lambda psi: 24 * psi,
            "one of the cases": lambda psi: 20 * PSIS[0],
            "elements": lambda psi: psi,
            "MB": lambda psi: 20 * psi / 1e6,
            "of a list": lambda psi: [20 * psi],
        },
    ),
    ("01", 2, "kept_inputs"): (
        {
            "stage0": KEPT[0],
            "twice": KEPT[1],
            "simulate": lambda *_, **__: KEPT[2],
            "after_forward": after_forward,
            "MODEL": {"layers": 8},
        },
        {
            "n + 1": lambda n, C, T, B: 2 * B * T * C * (n + 1),
            "apart": lambda n, C, T, B: 2 * B * T * C * n + 2 * B * T * C,
            "a loop": lambda n, C, T, B: sum(2 * B * T * C for _ in range(n + 1)),
        },
        {
            "one missing": lambda n, C, T, B: 2 * B * T * C * n,
            "two more": lambda n, C, T, B: 2 * B * T * C * (n + 2),
            "elements": lambda n, C, T, B: B * T * C * (n + 1),
            "fp32": lambda n, C, T, B: 4 * B * T * C * (n + 1),
            "no batch": lambda n, C, T, B: 2 * T * C * (n + 1),
            "no context": lambda n, C, T, B: 2 * B * C * (n + 1),
            "the batch alone": lambda n, C, T, B: 2 * B * 64 * 384 * 9,
            "a table": lambda n, C, T, B: {4: 1769472, 128: 56623104}[B],
            "one shape": lambda n, C, T, B: 1769472,
            "C squared": lambda n, C, T, B: 2 * B * T * C * C * (n + 1),
        },
    ),
    ("02", 4, "states_of"): (
        {"many": MANY},
        {
            "by stage": states,
            "per parameter": lambda stage, psi, n: psi * per_parameter(stage, n),
            "shares": lambda stage, psi, n: (
                psi * sum(b / (n if stage >= k else 1) for k, b in ((3, 2), (2, 2), (1, 12)))
            ),
        },
        {
            "stage 0 alone": lambda stage, psi, n: 16 * psi,
            "all cut": lambda stage, psi, n: 16 * psi / n,
            "no fp32 copy": lambda stage, psi, n: states(stage, psi, n) - 4 * psi / (n if stage else 1),
            "one stage too far": lambda stage, psi, n: states(min(3, stage + 1), psi, n),
            "one stage behind": lambda stage, psi, n: states(max(0, stage - 1), psi, n),
            "two ranks": lambda stage, psi, n: states(stage, psi, min(n, 2)),
            "n squared": lambda stage, psi, n: states(stage, psi, n * n),
            "MB": lambda stage, psi, n: states(stage, psi, n) / 1e6,
        },
    ),
    ("03", 1, "kept_inputs"): (
        {"runs": {case: run_of_zero_r(*case) for case in R}},
        {
            "by pa": kept_inputs,
            "ifs": lambda n, C, T, B, M, pa: 0 if pa == "cpu" else 2 * B * T * C * n // (M if pa == "on" else 1),
            "true division": lambda n, C, T, B, M, pa: {"cpu": 0.0}.get(
                pa, 2 * B * T * C * n / (M if pa == "on" else 1)
            ),
        },
        {
            "always cut": lambda n, C, T, B, M, pa: 2 * B * T * C * n // M,
            "never cut": lambda n, C, T, B, M, pa: 2 * B * T * C * n,
            "the host's too": lambda n, C, T, B, M, pa: 2 * B * T * C * n // (1 if pa == "off" else M),
            "the head's too": lambda n, C, T, B, M, pa: kept_inputs(n + 1, C, T, B, M, pa),
            "elements": lambda n, C, T, B, M, pa: kept_inputs(n, C, T, B, M, pa) // 2,
            "M of one run": lambda n, C, T, B, M, pa: kept_inputs(n, C, T, B, 2, pa),
            "M squared": lambda n, C, T, B, M, pa: kept_inputs(n, C, T, B, M * M, pa),
            "a word for the host": lambda n, C, T, B, M, pa: "none" if pa == "cpu" else kept_inputs(n, C, T, B, M, pa),
            "no line for cpu": lambda n, C, T, B, M, pa: {"off": 2, "on": 2 / M}[pa] * B * T * C * n,
        },
    ),
    ("04", 1, "largest"): (
        {
            "paper": types.SimpleNamespace(
                simulate=lambda script, n, **_: run_of_states(lesson.STAGES.index(script), n, 7.5e9),
                MODELS={"7.5B": {}},
            )
        },
        {
            "bytes per parameter": lambda stage, gb, n: gb * 1e9 / per_parameter(stage, n),
            "from states": lambda stage, gb, n: gb * 1e9 / states(stage, 1, n),
            "whole": lambda stage, gb, n: gb * 10**9 // per_parameter(stage, n),
        },
        {
            "GiB": lambda stage, gb, n: gb * 2**30 / per_parameter(stage, n),
            "billions": lambda stage, gb, n: gb / per_parameter(stage, n),
            "stage 3 always": lambda stage, gb, n: gb * 1e9 * n / 16,
            "no n": lambda stage, gb, n: gb * 1e9 / per_parameter(stage, 64),
            "baseline": lambda stage, gb, n: gb * 1e9 / 16,
            "parameters alone": lambda stage, gb, n: gb * 1e9 / 2,
            "all the cluster": lambda stage, gb, n: n * gb * 1e9 / per_parameter(stage, n),
            "of 32 GB": lambda stage, gb, n: 32e9 / per_parameter(stage, n),
        },
    ),
}
NUMBERS = {
    ("01", 3, "largest_psi"): (
        {"paper": types.SimpleNamespace(largest=lambda *_: 2.0)},
        (2e9, 2 * 10**9, 32e9 / 16, fractions.Fraction(32 * 10**9, 16)),
        (2, 128e9, 16e9, 8e9, 2**31, 32e9 / 12, 4e9, 1e9, "2B", [2e9], -2e9),
    ),
    ("02", 5, "factor"): (
        {
            "MODEL": {},
            "simulate": lambda script, **_: stand_in(elements={"stage1_os.py": 2, "stage2_grad.py": 17}[script]),
        },
        (8.5, 17 / 2, fractions.Fraction(17, 2)),
        (17, 16, 8, 1, 2 / 17, 9, "8.5", (17, 2)),
    ),
    ("04", 2, "ranks"): (
        {"paper": types.SimpleNamespace(states=lambda model, stage, n: 16_000 / n)},
        (200, 200.0),
        (186, 187, 199, 201, 500, 25, 150, 0, -200, 199.5, "200", [200]),
    ),
    ("04", 3, "n"): (
        {"paper": types.SimpleNamespace(states=lambda model, stage, n: 7.5 * per_parameter(stage, n))},
        (87, 87.0),
        (7, 8, 86, 88, 1000, 0, 86.3, "87", {}),
    ),
    ("04", 4, "blocks"): (
        {"simulate": lambda *_, layers, **__: states_of(layers)},
        (7, 7.0),
        (1, 2, 5, 6, 8, 14, 40, 3000, -7, "7", None),
    ),
}
WRONG_RESULTS = {
    "nothing": lambda *_: None,
    "a word": lambda *_: "many",
    "a list": lambda *_: [1, 2],
    "not a number": lambda *_: math.nan,
    "infinite": lambda *_: math.inf,
    "zero": lambda *_: 0,
    "negative": lambda *_: -1,
    "true": lambda *_: True,
    "an error": lambda *_: 1 / 0,
    "a missing key": lambda *_: {}["psi"],
    "a name of nothing": lambda *_: nothing_at_all,  # noqa: F821
    "no argument": lambda: 1,
    "a class": lambda *_: object,
    "a generator": lambda *_: (n for n in range(3)),
}
NO_FUNCTION = (None, 16, "16 * psi", [])


def said_of(place, reads, answer):
    number, exercise, name = place
    line = verdict(number, exercise, **reads, **{name: answer})
    assert line.count("\n") == 1 and "Traceback" not in line, line
    return line


@pytest.mark.parametrize("place", FUNCTIONS, ids=lambda place: f"{place[0]}, exercise {place[1]}")
def test_functions(place):
    reads, right, wrong = FUNCTIONS[place]
    for name, answer in right.items():
        assert ": right" in said_of(place, reads, answer), name
    for name, answer in (wrong | WRONG_RESULTS | {str(what): what for what in NO_FUNCTION}).items():
        assert ": right" not in said_of(place, reads, answer), name


@pytest.mark.parametrize("place", NUMBERS, ids=lambda place: f"{place[0]}, exercise {place[1]}")
def test_numbers(place):
    reads, right, wrong = NUMBERS[place]
    for answer in right:
        assert ": right" in said_of(place, reads, answer), answer
    for answer in (*wrong, None, math.nan, math.inf, True, print):
        assert ": right" not in said_of(place, reads, answer), answer


def test_there_are_many():
    """Right and wrong ones, here and in test_exercises.py."""
    tables = [*FUNCTIONS.values(), *NUMBERS.values()]
    assert sum(len(right) for _, right, _ in tables) >= 25
    assert sum(len(wrong) for _, _, wrong in tables) >= 90
