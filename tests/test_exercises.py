"""The exercises of notebooks 2 and 3, right in several ways and wrong on purpose: the check says so in one line."""

import io
import os
import re
import sys
import textwrap
from contextlib import redirect_stdout

import matplotlib
import nbformat
import pytest
from launch import ROOT, with_all

os.environ["ZERO_SMALL"] = "1"
matplotlib.use("Agg")
sys.path.append(str(ROOT / "notebooks"))

import exercise  # noqa: E402
import lesson  # noqa: E402

CELLS, CELLS_R = (nbformat.read(ROOT / "notebooks" / name, 4).cells for name in ("02_zero_dp.ipynb", "03_zero_r.ipynb"))


class Solution:
    """What a folded solution fills in."""

    def fill(self, **parts):
        self.parts = {letter: textwrap.dedent(part).strip() for letter, part in parts.items()}


@pytest.fixture(scope="module")
def stages(tmp_path_factory):
    """The three exercises, their files in a folder of their own, with their solutions: {number: (exercise, parts)}."""
    exercise.FOLDER = tmp_path_factory.mktemp("exercises")
    names, answers = {}, {f"my_stage{n}": Solution() for n in (1, 2, 3)}
    exec(CELLS[1].source, names)
    for cell in CELLS:
        tags = cell.metadata.get("tags", [])
        if "exercise" in tags:
            exec(cell.source, names)
        if "solution" in tags and "my_stage" in cell.source:
            exec(re.search(r"```python\n(.*?)\n```", cell.source, re.DOTALL)[1], answers)
    return {n: (names[f"my_stage{n}"], answers[f"my_stage{n}"].parts) for n in (1, 2, 3)}


def said(check):
    out = io.StringIO()
    with redirect_stdout(out):
        right = check()
    lines = out.getvalue().splitlines()
    assert len(lines) == 1, lines
    return right, lines[0]


# Exercise, gap by gap what is done otherwise than in the solution, and what the check says.
WRONG = {
    "1, the whole fp32 copy under another name": (
        1, {"a": "self.master = full[self.own].clone()\nself.all = full"}, "buffers.* self.all of .* keeps",
    ),
    "1, the whole fp32 copy in a list of the module": (
        1, {"a": "self.master = full[self.own].clone()\nglobals().setdefault('kept', []).append(full)"},
        "bytes of buffers",
    ),
    "1, this rank's fp32 gradients as bytes, which are no tensor": (
        1, {"c": lambda part: "kept = [layer.grad[layer.own].float().numpy().tobytes() for layer in layers]\n" + part},
        "bytes in something that is no tensor",
    ),
    "1, a view of the whole fp32 copy": (1, {"a": "self.master = full[self.own]"}, "bytes of optimizer states"),
    "1, a whole fp32 gradient, and a slice of it": (
        1, {"c": "for layer in layers:\n    layer.master.grad = layer.grad.float()[layer.own]\n    layer.grad = None"},
        "'fp32 gradients' .* bytes of buffers",
    ),
    "1, no exchange of parameters": (
        1, {"d": "for layer in layers:\n    layer.flat[layer.own].copy_(layer.master)"}, "loss of step",
    ),
    "1, exchange of gradients as well": (
        1, {"b": "return comm.all_gather(meter.name(layer.grad.to(dtype), 'gradients', layer), layer)"},
        "sends 1.500 Ψ elements",
    ),
    "1, a word that is not Python": (1, {"c": "for layer in layers"}, r"SyntaxError: .*my_stage1.py, line \d+"),
    "1, a name that does not exist": (1, {"b": "layer.gard[0]"}, r"AttributeError: .*my_stage1.py, line \d+, in"),
    "2, no reduction is finished in the loop": (
        2, {"b": "reducing = [*(reducing or []), comm.reduce_scatter(flat_grad, layer)]\ndel flat_grad\n"
            "if layer is layers[0]:\n    for transfer in reducing:\n        finish_reduction(transfer)\n"
            "    reducing = None"},
        "bytes of",
    ),
    "2, whole gradients until the end of backward": (
        2, {"b": lambda part: "kept = [] if layer is layers[-1] else kept\nkept.append(flat_grad)\n" + part},
        "bytes of gradients",
    ),
    "2, whole gradients hang on the layers": (
        2, {"b": lambda part: "layer.whole = flat_grad\n" + part}, "self.whole of .* keeps",
    ),
    "2, the last micro-batch alone": (2, {"a": "layer.grad = reducing.wait().to(grad_dtype)"}, "norm of step 0"),
    "3, all parameters besides the slice": (
        3, {"a": "self.flat = full.to(self.dtype, copy=True)\nself.shard = self.flat[self.own].clone()"},
        "bytes of parameters",
    ),
    "3, the same under another name": (
        3, {"a": "self.all = full.to(self.dtype, copy=True)\nself.shard = self.all[self.own].clone()"},
        "self.all of .* keeps",
    ),
    "3, a view of all parameters": (3, {"a": "self.shard = full.to(self.dtype)[self.own]"}, "bytes of parameters"),
    "3, without del flat": (3, {"b": lambda part: part.replace("del flat", "")}, "has been used and is still whole"),
    "3, the forward's copies until Adam": (
        3, {"b": lambda part: part.replace("del flat", "kept = [*(kept if len(inputs) > 2 else []), flat]")},
        "has been used and is still whole",
    ),
    "3, gathered in one micro-batch's forward alone": (3, {"c": "flat = layer.shard\nx = inputs.pop()"}, "Error: "),
}  # fmt: skip
FEW = [*WRONG][::9]  # by default
RIGHT = {
    "1": (1, {}),
    "2": (2, {}),
    "3": (3, {}),
    "2, with a name for the meter": (2, {"a": lambda part: part + '\nmeter.name(layer.grad, "gradients")'}),
    "2, waiting at once": (
        2, {"b": "reducing = comm.reduce_scatter(flat_grad, layer)\ndel flat_grad\nfinish_reduction(reducing)\n"
            "reducing = None"},
    ),
    "2, another sum": (
        2, {"a": "average = reducing.wait().to(grad_dtype)\n"
            "layer.grad = average.clone() if layer.grad is None else layer.grad + average"},
    ),
}  # fmt: skip


def filled(stages, number, parts):
    task, solution = stages[number]
    changed = {letter: part(solution[letter]) if callable(part) else part for letter, part in parts.items()}
    task.fill(**solution | changed)
    return task


@pytest.mark.parametrize("name", [*FEW, *with_all(*((name,) for name in WRONG if name not in FEW))])
def test_wrong_is_refused_in_one_line(name, stages):
    number, parts, words = WRONG[name]
    right, line = said(filled(stages, number, parts).check)
    assert not right and re.search(f"my_stage{number}.py: not yet. .*({words})", line), line


@pytest.mark.parametrize("name", ["1", "3", *with_all(*((name,) for name in RIGHT if name not in "13"))])
def test_right_is_right(name, stages):
    right, line = said(filled(stages, *RIGHT[name]).check)
    assert right and ": right" in line, line


def test_unsolved_and_started_again(stages):
    task = filled(stages, 1, {})
    with redirect_stdout(io.StringIO()) as out:
        task.start_again()
    assert re.search(r"my_stage1.py.*: a in line \d+, b in line \d+, c in line \d+, d in line \d+", out.getvalue())
    assert said(task.check) == (False, "my_stage1.py: not solved yet")
    assert "full[self.own].clone()" in task.path.with_suffix(".before.py").read_text()


def test_the_reader_s_file_stays(stages):
    task, _ = stages[1]
    task.path.write_text("mine")
    task.__init__(task.path.name, "stage0_ddp.py")
    assert task.path.read_text() == "mine"
    task.start_again()


@pytest.fixture(scope="module")
def zero_r():
    """What the check cells of notebook 3 need of the cells before them: (names, {exercise: source of its check})."""
    names = {}
    exec(CELLS_R[1].source, names)
    c5 = lesson.simulate("zero_r.py", ranks=8, mp=2, config="C5", buffer_elements=2**14, **names["DEEP"])
    names["peaks"] = {"C5": c5.one("memory")["peak"]}
    checks = [cell.source for cell in CELLS_R if "check" in cell.metadata.get("tags", [])]
    return names, {int(re.search(r"exercise (\d)", source)[1]): source for source in checks}


@pytest.mark.parametrize(
    "mine, words",
    [
        ({"mp": 2, "config": "C5", "buffer_elements": 2**14}, "not solved yet"),
        ({"mp": 4, "config": "full", "md": "off"}, "right"),
        *with_all(
            ({"mp": 2, "config": "C5", "buffer_elements": 2**14, "md": "off"}, "not yet. that takes 97.5 % of"),
            ({"mp": 2, "config": "full", "buffer_elements": 2**12}, "not yet. that takes 8"),
            ({"mp": 4, "config": "full", "buffer_elements": 2**14}, "not yet. that takes 86"),
        ),
        ({"mp": 8}, "not yet. .*--mp 8 must divide"),
        ({"mp": 2.0}, "not yet. .*--mp"),
        ({"md": "maybe"}, "not yet. .*--md"),
        ({"layers": 1}, "not yet. layers shall stay as it is"),
        ("mp=4", "not yet. .* is no dict"),
        ((4, "full"), "not yet. .* is no dict"),
        (None, "not yet. None is no dict"),
    ],
)
def test_a_setting_of_zero_r(mine, words, zero_r):
    names, checks = zero_r
    _, line = said(lambda: exec(checks[4], {**names, "mine": mine}))
    assert re.match(f"exercise 4: ({words})", line), line


@pytest.mark.parametrize(
    "without, with_pa, first, second",
    [
        (67, 4, "right", "right"),
        (67.1, 4.2, "right", "right"),
        (69, 5, "not yet. 69 is", "not yet. 5 is"),
        (33, 2, "not yet. 33: That counts elements", "not yet. 2: That counts elements"),
        ("67 GB", (4,), "not yet. '67 GB' is not", "not yet. .* is not a number"),
    ],
)
def test_gigabytes_of_inputs(without, with_pa, first, second, zero_r):
    names, checks = zero_r
    out = io.StringIO()
    with redirect_stdout(out):
        exec(checks[2], {**names, "without_pa": without, "with_pa": with_pa})
    lines = out.getvalue().splitlines()
    assert len(lines) == 2 and all(re.search(": " + words, line) for words, line in zip((first, second), lines)), lines


@pytest.mark.parametrize("answer", ["three", "3.0", (3, 4), [3], 3.5, True, {}, "", 0, float("nan"), print])
def test_any_wrong_answer_is_one_line(answer):
    right, line = said(lambda: lesson.check(answer, 3.0, "exercise"))
    assert not right and line.startswith("exercise: not yet. ")
    right, line = said(lambda: lesson.check_function(lambda n: answer, [((1,), 3)], "exercise"))
    assert not right and line.startswith("exercise: not yet. For (1) ")


def test_usual_mistakes_are_named():
    assert said(lambda: lesson.check(33, 66, "e", usual={33: "elements"}))[1] == "e: not yet. 33: elements"
    usual = {0.75: "the fp32 copy"}
    line = said(lambda: lesson.check_function(lambda n: 12, [((1,), 16)], "f", usual=usual))[1]
    assert line.endswith("the fp32 copy")
    assert said(lambda: lesson.check_function(lambda n: n / 0, [((1,), 16)], "f"))[1].count("ZeroDivisionError") == 1


def test_no_simulation_of_no_rank():
    with pytest.raises(RuntimeError, match="1 rank or more"):
        lesson.simulate("stage0_ddp.py", ranks=0)
