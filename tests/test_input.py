"""What the user can put right is said in one line, once, without a traceback; and what may look odd works."""

import math
import os
import subprocess
import sys

import pytest
from launch import ROOT, STAGES, TINY, hashes, launch, losses, start, torchrun, with_all

SCRIPTS = (*STAGES, "zero_r.py")
BAD = [  # (options, what the line must contain); the scripts take turns, and the status is 2
    # Numbers that don't fit together, or lie outside their limits, or are none.
    ("--width 250 --heads 8", "--width 250 is not a multiple of --heads 8"),
    ("--heads 6", "--width 35 is not a multiple of --heads 6"),
    ("--width 0", "--width 0 must be 1 or more"),
    ("--width -35", "--width -35"),
    ("--width 4000000000000000000 --heads 1", "the states alone take"),
    ("--width 4e18", "--width: invalid int value: '4e18'"),
    ("--layers 0", "--layers 0"),
    ("--layers 1.5", "--layers: invalid int value: '1.5'"),
    ("--layers 1000000000", "the states alone take"),
    ("--heads 0", "--heads 0"),
    ("--context 0", "--context 0"),
    ("--context 1000000000", "10^8 tokens"),
    ("--vocab 255", "--vocab 255 must be 256 or more"),
    ("--vocab 10000000000000000000", "the states alone take"),
    ("--batch 0", "--batch 0"),
    ("--batch -1", "--batch -1"),
    ("--batch 1000000000", "10^8 tokens"),
    ("--micro-batches 0", "--micro-batches 0"),
    ("--steps 0", "--steps 0"),
    ("--steps many", "--steps: invalid int value: 'many'"),
    ("--lr 0", "--lr 0"),
    ("--lr -1", "--lr -1"),
    ("--lr nan", "--lr nan"),
    ("--lr 1e400", "--lr inf"),
    ("--clip 0", "--clip 0"),
    ("--clip inf", "--clip inf"),
    ("--clip x", "--clip: invalid float value: 'x'"),
    ("--warmup -1", "--warmup -1"),
    ("--loss-scale 0.5", "--loss-scale 0.5"),
    ("--loss-scale nan", "--loss-scale nan"),
    ("--loss-scale-window 0", "--loss-scale-window 0"),
    ("--seed 0.5", "--seed: invalid int value: '0.5'"),
    ("--simulate-ranks -1", "--simulate-ranks -1"),
    ("--simulate-ranks 1e3", "--simulate-ranks: invalid int value: '1e3'"),
    # Words that are none of the choices; options that don't exist.
    ("--dtype float8", "--dtype: invalid choice: 'float8'"),
    ("--compute fast", "--compute: invalid choice: 'fast'"),
    ("--device tpu", "--device: invalid choice: 'tpu'"),
    ("--device cuda", "--device cuda needs a GPU for each of"),
    ("--collectives nccl", "--collectives: invalid choice: 'nccl'"),
    ("--overlap yes", "--overlap: invalid choice: 'yes'"),
    ("--no-such-option", "--no-such-option"),
    ("--layer 3", "--layer 3"),  # no abbreviations: an option added later would change what they mean
    ("--layers", "--layers: expected one argument"),
    ("3", "unrecognized arguments: 3"),
    # Files. EMPTY, FILE and FIFO are made for the test.
    ("--data missing.txt", "--data missing.txt is no regular file"),
    ("--data missing.txt --log-file FILE", "--data missing.txt is no regular file"),
    ("--data tests", "--data tests is no regular file"),
    ("--data EMPTY", "has 0 bytes"),
    ("--data FILE --context 1000", "has 1000 bytes, a sequence takes --context 1000 + 1"),
    ("--data FIFO", "is no regular file"),  # nobody writes into it
    ("--data /dev/stdin", "is no regular file"),
    ("--data /dev/zero", "is no regular file"),
    ("--data FILE --log-file FILE", "would overwrite it"),
    ("--log-file tests", "tests: Is a directory"),
    ("--log-file no/such/folder", "no/such/folder: No such file or directory"),
    ("--log-file /dev/full", "No space left on device"),
    # What no memory holds.
    ("--width 1000000 --heads 1", "the states alone take"),
    ("--batch 10000 --width 1000 --heads 1 --context 5000", "not enough memory"),
]
BAD = [(SCRIPTS[number % len(SCRIPTS)], *row) for number, row in enumerate(BAD)]
BAD += [
    ("zero_r.py", "--simulate-ranks 3 --mp 3", "--mp 3 must divide --heads 5"),
    ("zero_r.py", "--simulate-ranks 6 --mp 5 --heads 7", "--mp 5 must divide ranks 6"),
    ("zero_r.py", "--mp 2", "--mp 2 must divide ranks"),
    ("zero_r.py", "--mp 0", "--mp 0"),
    ("zero_r.py", "--buffer-elements 100", "--buffer-elements 100 must be a multiple of 16"),
    ("zero_r.py", "--buffer-elements 0", "--buffer-elements 0"),
    (
        "zero_r.py",
        "--simulate-ranks 64 --buffer-elements 512",
        "--buffer-elements 512 must be a multiple of 16, and 1024",
    ),
    ("zero_r.py", "--config C6", "--config: invalid choice: 'C6'"),
    ("zero_r.py", "--partition p", "--partition: invalid choice: 'p'"),
    ("zero_r.py", "--pa host", "--pa: invalid choice: 'host'"),
    ("zero_r.py", "--cb 1", "--cb: invalid choice: '1'"),
    ("zero_r.py", "--md yes", "--md: invalid choice: 'yes'"),
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="/dev/full, /proc")


def run(script, options, tmp_path, ranks):
    files = {name: str(tmp_path / name) for name in ("EMPTY", "FILE", "FIFO")}
    for name, size in (("EMPTY", 0), ("FILE", 1000)):
        (tmp_path / name).write_bytes(bytes(size))
    os.mkfifo(files["FIFO"])
    options = [files.get(option, option) for option in options.split()]
    return launch(script, *TINY, *options, ranks=ranks, log="--log-file" not in options)


def one_line(run):
    (line,) = run.err.splitlines()
    assert "Traceback" not in run.out + run.err
    return line


@pytest.mark.parametrize(("script", "options", "contains"), BAD)
def test_with_python(script, options, contains, tmp_path):
    bad = run(script, options, tmp_path, ranks=1)
    assert contains in one_line(bad) and bad.status == 2
    assert one_line(bad).startswith(f"{script}: ") and (tmp_path / "FILE").stat().st_size == 1000


SIXTH = [row for row in BAD if "--simulate-ranks" not in row[1]][::6]


@pytest.mark.parametrize(("script", "options", "contains"), [*SIXTH, (STAGES[1], "--simulate-ranks 4", "--simulate-")])
def test_with_two_ranks(script, options, contains, tmp_path):
    bad = run(script, options, tmp_path, ranks=2)
    assert contains in one_line(bad) and bad.status != 0


@pytest.mark.slow
def test_with_torchrun():
    bad = torchrun(STAGES[1], "--width", 250, "--heads", 8)
    assert bad.status != 0
    assert bad.err.count("stage1_os.py: --width 250 is not a multiple of --heads 8") == 1  # torchrun adds a report


# ---- A full disk, another environment ----


@linux
def test_a_full_disk_under_stdout():
    with open("/dev/full", "w") as full:
        command = [sys.executable, ROOT / STAGES[2], *TINY]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=180)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "No space left on device" in line


@linux
@pytest.mark.slow
def test_a_log_that_stops_short(tmp_path):
    """A limit of the size of files, as of a disk that fills, is no end with status 0."""
    limited = ["sh", "-c", 'ulimit -f 4; exec "$@"', "sh"]  # 2 or 4 kB
    command = [*limited, sys.executable, ROOT / STAGES[3], *TINY, "--log-file", tmp_path / "log"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and "File too large" in line


@linux
def test_any_regular_file_is_text():
    """This one says that it has 0 bytes."""
    assert launch(STAGES[0], *TINY, "--data", "/proc/cpuinfo").status == 0


@pytest.mark.parametrize("value", ("", "0", "3"))
def test_what_torchrun_would_set_is_ignored_without_it(value):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    run = launch(STAGES[1], *TINY, env=dict.fromkeys(names, value))
    assert (run.status, run.err) == (0, "") and "N = 1 ranks on cpu" in run.out
    bad = launch(STAGES[1], "--layers", 0, env=dict.fromkeys(names, value), timeout=9)  # it speaks without waiting
    assert bad.status == 2 and "--layers 0" in one_line(bad)


@pytest.mark.parametrize("options", [("--help",), *with_all(((),))], ids=["help", "run"])
def test_a_terminal_without_greek(options):
    process = start(ROOT / STAGES[3], *TINY, *options, ranks=0, env={"PYTHONIOENCODING": "ascii"})
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (0, "") and "?" in out and out.isascii()


# ---- A reader changes the model ----

HEAD = "self.logits = nn.Linear(cfg.width, cfg.vocab, bias=False)\n"


def edited(tmp_path, *changes, script=STAGES[3], ranks=2):
    source = (ROOT / script).read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    (tmp_path / script).write_text(source)
    return launch(tmp_path / script, *TINY, ranks=ranks)


@pytest.mark.parametrize(
    ("contains", "changes"),
    [
        ("logits.weight of head is frozen", [(HEAD, HEAD + "        self.logits.requires_grad_(False)\n")]),
        (
            "block 1 has a weight of another layer, or is used twice; a layer trains its own",
            [
                ("class Block", "NORM = nn.LayerNorm(35)\n\n\nclass Block"),
                ("mlp_norm = nn.LayerNorm(cfg.width)", "mlp_norm = NORM"),
            ],
        ),
    ],
    ids=["frozen", "shared"],
)
def test_a_model_that_a_flat_vector_does_not_hold(contains, changes, tmp_path):
    bad = edited(tmp_path, *changes)
    assert contains in one_line(bad) and bad.status != 0


def test_a_buffer_works(tmp_path):
    half = 'self.register_buffer("damping", torch.full((), 0.5))'
    changes = [
        ("self.heads = cfg.heads\n", f"self.heads = cfg.heads\n        {half}\n"),
        ("F.gelu(", "self.damping * F.gelu("),
    ]
    run = edited(tmp_path, *changes)
    assert losses(run)[-1] < losses(run)[0] and losses(run) != losses(launch(STAGES[3], *TINY, ranks=2))


def test_a_modules_own_initial_weights_count(tmp_path):
    run = edited(tmp_path, ("initialize(self, cfg)\n\n    def forward(self, x, y):  # x (B, T, C), y", (
        "nn.init.zeros_(self.logits.weight)\n\n    def forward(self, x, y):  # x (B, T, C), y"
    )))  # fmt: skip
    assert losses(run)[0] == pytest.approx(math.log(257), rel=1e-6)  # all logits are equal


def test_names_decide_nothing(tmp_path):
    """A LayerNorm of another name starts at one too."""
    run = edited(tmp_path, ("attention_norm", "ln_1"))
    assert hashes(run) == hashes(launch(STAGES[3], *TINY, ranks=2))
