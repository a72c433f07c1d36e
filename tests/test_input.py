"""What the user can put right is said in one line, once, without a traceback."""

import pytest
from launch import STAGES, TINY, launch, torchrun

BAD = [  # (options, what the line must contain)
    ("--width 250 --heads 8", "--width 250"),
    ("--data missing.txt", "--data missing.txt"),
    ("--data tests", "--data tests"),  # a directory
    ("--data EMPTY", "--context"),
    ("--data .gitignore --context 1000", "--data .gitignore"),
    ("--layers 0", "--layers 0"),
    ("--heads 0", "--heads 0"),
    ("--batch -1", "--batch -1"),
    ("--micro-batches 0", "--micro-batches 0"),
    ("--context 0", "--context 0"),
    ("--vocab 255", "--vocab 255"),
    ("--steps 0", "--steps 0"),
    ("--steps many", "--steps"),
    ("--lr 0", "--lr 0"),
    ("--lr nan", "--lr nan"),
    ("--clip inf", "--clip inf"),
    ("--warmup -1", "--warmup"),
    ("--simulate-ranks -1", "--simulate-ranks"),
    ("--dtype float16", "--dtype"),
    ("--compute fast", "--compute"),
    ("--device cuda", "--device cuda"),
    ("--log no/such/folder", "--log no/such/folder"),
    ("--log /dev/full", "--log /dev/full"),
    ("--data FILE --log FILE", "overwrite"),
    ("--vocab 1000000000000", "memory is too small"),
    ("--no-such-option", "--no-such-option"),
    ("--layer 3", "--layer 3"),  # no abbreviations: an option added later would change what they mean
]


def check(run, contains):
    (line,) = run.err.splitlines()  # one line, printed once
    assert contains in line and "Traceback" not in run.out + run.err


def run(options, tmp_path, ranks):
    for name, size in (("EMPTY", 0), ("FILE", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    options = [str(tmp_path / option) if option in ("EMPTY", "FILE") else option for option in options.split()]
    return launch(STAGES[1], *TINY, *options, ranks=ranks, env={"CUDA_VISIBLE_DEVICES": ""}, log="--log" not in options)


@pytest.mark.parametrize(("options", "contains"), BAD)
def test_with_python(options, contains, tmp_path):
    bad = run(options, tmp_path, ranks=1)
    assert bad.status == 2
    check(bad, contains)


@pytest.mark.parametrize(("options", "contains"), [*BAD[::6], ("--simulate-ranks 4", "--simulate-ranks")])
def test_with_two_ranks(options, contains, tmp_path):
    bad = run(options, tmp_path, ranks=2)
    assert bad.status != 0
    check(bad, contains)


def test_with_torchrun():
    bad = torchrun(STAGES[1], "--width", 250, "--heads", 8)
    assert bad.status != 0
    assert bad.err.count("stage1_os.py: --width 250 is not a multiple of --heads 8") == 1  # torchrun adds a report
