"""The checks of the exercises in notebooks 1, 3, 4 and 5: a wrong answer is refused in one line, a right one accepted.

The cell of a check is run as it stands in the notebook, with the answer's names set, and with the little that it reads
of the cells above it.
"""

import contextlib
import io
import json
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
