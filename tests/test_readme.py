"""What the pages say is so: their commands, their quotations of code, their links, the changes that they propose."""

import ast
import os
import re
import shutil
import subprocess

import carry
import pytest
import test_diffs
from launch import ROOT, STAGES, TINY, hashes, launch, losses

README = (ROOT / "README.md").read_text()
PAGES = ("README.md", ".github/CONTRIBUTING.md", "tests/README.md", "notebooks/README.md")
FILES = (*STAGES, "zero_r.py")
# The commands of the pages, and the test file that runs them or what they run. What none does, tests/README.md lists.
COMMANDS = {
    "pip install -r requirements.txt && torchrun --standalone --nproc-per-node 2 stage1_os.py": "test_learning.py",
    "pip install -r requirements.txt && python -m pytest -q tests": "conftest.py",
    "torchrun --standalone --nproc-per-node 4 zero_r.py --mp 2 --config C4": "test_zero_r.py",
    "torchrun --standalone --nproc-per-node 2 stage3_param.py --steps 2 --log-file run.jsonl": "test_film.py",
    "python notebooks/film.py run.jsonl": "test_film.py",
    "python stage2_grad.py --simulate-ranks 64 --layers 72 --width 2944 --heads 23 --context 1024 --batch 1": (
        "test_readme.py"
    ),
    **{f"git diff --no-index {one} {two}": "test_diffs.py" for one, two in zip(FILES, FILES[1:])},
    "python tests/carry.py": "test_readme.py",
    "python tests/measure.py": "test_measured.py",
    "python tests/fake_cuda.py --peaks": "test_cuda.py",
    "python tests/fake_cuda.py --kernels": "test_cuda.py",
    "python -m pytest -q tests/test_diffs.py tests/test_losses.py": "test_losses.py",
    "python -m pytest -q tests/test_losses.py": "test_losses.py",
}
COMMAND = r"(?:(?:pip|python|torchrun|git diff|jupyter|pkill|%cd) |!)\S"


def commands(page):
    """Every indented line and every piece of code in a sentence that a reader may type."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(rf"^    ({COMMAND}.*)$", text, re.MULTILINE)
    return found + re.findall(rf"`({COMMAND}[^`]*)`", text)


def test_two_commands_do_everything():
    found = re.findall(r"^    (pip install -r requirements.txt && .*)$", README, re.MULTILINE)
    assert len(found) == 2 and "torchrun" in found[0] and "pytest" in found[1]


def test_every_command_is_run_or_named_as_not_run():
    text, named = (ROOT / "tests/README.md").read_text().split("## Commands that no test runs")
    not_run = set(re.findall(r"`([^`]+)`", named))
    shown = {command for page in PAGES for command in commands(page)}
    assert shown - not_run == COMMANDS.keys()
    assert not_run <= shown | {"tests/README.md"}
    for where in COMMANDS.values():
        assert (ROOT / "tests" / where).exists(), where


def test_the_simulation_of_the_readme():
    (command,) = re.findall(r"^    python (stage2_grad.py --simulate-ranks .*)$", README, re.MULTILINE)
    run = launch(*command.split(), timeout=300)
    (memory,) = run.of("memory")
    assert run.of("config")[0]["psi"] == pytest.approx(7.5e9, rel=0.01)
    assert memory["states"] / 1e9 == pytest.approx(16.6, abs=0.1)  # as in the paper's Figure 1


def test_options_exist():
    for page in PAGES:
        for command in commands(page):
            for script, options in re.findall(r"\b((?:stage|zero)\w+\.py)(.*)", command):
                source = (ROOT / script).read_text()
                for option in re.findall(r" --([\w-]+)", options):
                    assert f"    {option.replace('-', '_')}: " in source, (script, option)


def anchors(path):
    """Those that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", (ROOT / page).read_text())
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_front_page_is_short():
    assert len(README.splitlines()) <= 150


def test_the_diff_on_the_front_page_is_that_of_stage_1():
    """Each line without its comment: what is removed is in stage 0 alone, what is added in stage 1 alone."""
    (quoted,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)

    def code(line):
        return re.sub(r"  +# .*", "", line).strip()

    one, two = ([code(line) for line in (ROOT / stage).read_text().splitlines()] for stage in STAGES[:2])
    lines = quoted.splitlines()
    assert len(lines) == 6
    for line in lines:
        assert ((code(line[1:]) in one), (code(line[1:]) in two)) == (line[0] in " -", line[0] in " +"), line


def test_the_table_of_sections_names_what_exists():
    rows = re.findall(r"^\| (§[^|]*)\|[^|]*\| `(\w+\.py)` \|([^|]*)\|$", README, re.MULTILINE)
    assert len(rows) >= 9
    for section, script, where in rows:
        source = (ROOT / script).read_text()
        names = {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for name in re.findall(r"`([\w.]+)`", where):
            assert set(name.split(".")) <= names, (script, name)
        for number in re.findall(r"§[\d.]+\d", section):
            assert number in source, (script, number)


@pytest.mark.parametrize("script", FILES)
def test_help_reads_as_a_page(script):
    run = launch(script, "--help", log=False)
    assert run.status == 0 and run.err == ""
    options = re.findall(r"^    (\w+): \w+ = option\(", (ROOT / script).read_text(), re.MULTILINE)
    assert len(options) >= 20
    for option in options:
        assert re.search(rf"^  --{option.replace('_', '-')}\b", run.out, re.MULTILINE), option
    assert "§" in run.out and "torchrun --standalone" in run.out


# ---- .github/CONTRIBUTING.md: what it says of changes ----


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The five files, committed in a repository of their own, and test_diffs.py looking at these."""
    for name in ("HOME", "XDG_CONFIG_HOME"):  # nobody's own settings of git
        monkeypatch.setenv(name, str(tmp_path))
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path)
    monkeypatch.setattr(test_diffs, "ROOT", tmp_path)
    git(tmp_path, "init", "-q")
    commit(tmp_path, *FILES)
    return tmp_path


def git(folder, *command):
    own = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    subprocess.run(["git", *command], cwd=folder, env=os.environ | own, check=True)


def commit(folder, *files):
    git(folder, "add", *files)
    git(folder, "commit", "-qm", "a change")


def replace(folder, file, *changes):
    text = (folder / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, (file, old)
        text = text.replace(old, new)
    (folder / file).write_text(text)


@pytest.mark.parametrize("committed", (False, True))
def test_carry(copy, committed):
    shared = [
        ("size C of the hidden state", "size C of each hidden vector"),  # section 7
        ("(self.psi / unit)", "(self.psi / unit + 0)"),  # in Layer.__init__, which differs, but not here
        ("class Collectives:", "class Something:\n    pass\n\n\nclass Collectives:"),
    ]
    replace(copy, STAGES[0], *shared)
    if committed:
        commit(copy, STAGES[0])
    assert carry.carry(copy) == []
    for file in FILES:
        for _, new in shared:
            assert new in (copy / file).read_text(), file
    for stage in STAGES[1:]:
        test_diffs.test_shared_sections_are_equal(stage)
    before = [(copy / file).read_text() for file in FILES]
    assert carry.carry(copy) == [] and before == [(copy / file).read_text() for file in FILES]  # once is enough


def test_carry_twice_before_a_commit(copy):
    for old, new in (("hidden state", "hidden vector"), ("hidden vector", "stream")):
        replace(copy, STAGES[0], ("size C of the " + old, "size C of the " + new))
        left = carry.carry(copy)
    assert [file for file, *_ in left] == ["zero_r.py"]  # whose sections are not copies
    for stage in STAGES[1:]:
        test_diffs.test_shared_sections_are_equal(stage)


def test_carry_says_what_it_cannot_place(copy):
    old = "        layer.flat.copy_(layer.master)"  # the later stages have another line in its place
    replace(copy, STAGES[0], (old, old + "  # new"))
    before = [(copy / file).read_text() for file in FILES]
    assert carry.carry(copy) == [(file, "train_step", [old], [old + "  # new"]) for file in FILES[1:]]
    assert before == [(copy / file).read_text() for file in FILES]


def test_carry_copies_what_is_shared_even_if_history_does_not_tell(copy):
    """All files are committed, and stage 0 is ahead of the others."""
    replace(copy, STAGES[0], ("size C of the hidden state", "size C of each hidden vector"))
    for stage in STAGES[1:]:
        replace(copy, stage, ('"""Stage', '"""The stage'))
    commit(copy, *STAGES)
    carry.carry(copy)
    for stage in STAGES[1:]:
        test_diffs.test_shared_sections_are_equal(stage)


def proposed(name, source, stage):
    """A stage with the change that the page prints under this name."""
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (block,) = re.findall(f"<!-- {name} -->\n```diff\n(.*?)```", page, re.DOTALL)
    if stage == STAGES[0]:  # as the page says
        block = block.replace("[self.own].clone()", "").replace("KΨ/N, with K = 12 (§5.1)", "KΨ, with K = 12 (§3.1)")
        block = block.replace(" * psi / world_size", " * psi")
    for hunk in block.split("@@\n"):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] != "+")
        assert source.count(old) == 1, old
        source = source.replace(old, "".join(line[1:] for line in lines if line[0] != "-"))
    return source


@pytest.mark.parametrize("name", ("group", "matrices", "schedule", "sgd"))
def test_a_change_of_the_optimizer(name, tmp_path):
    """It trains, in another way than before, all stages do the same, and the states are still those of the formula."""
    options = (*TINY, "--dtype", "float32", "--lr", 0.1 if name == "sgd" else 5e-3, "--warmup", 2)
    runs = []
    for stage in STAGES:
        (tmp_path / stage).write_text(proposed(name, (ROOT / stage).read_text(), stage))
        runs.append(launch(tmp_path / stage, *options, ranks=2))
        memory, _ = runs[-1].of("memory")
        assert memory["formula"] <= memory["states"] < 1.02 * memory["formula"], (stage, memory)
    assert losses(runs[0])[-1] < losses(runs[0])[0]
    assert all(hashes(run) == hashes(runs[0]) for run in runs)
    assert hashes(runs[0])[1] != hashes(launch(STAGES[0], *options, ranks=2))[1]
