"""How a test is written. It starts a script as a user would and looks at what came of it:

    run = launch("stage1_os.py", *TINY, "--dtype", "float32", ranks=2)
    assert losses(run)[-1] < losses(run)[0] and run.of("communication")[0]["elements"] > 0

`Run` has the exit status, what was printed, and the records of the log; `tiny()` is launch() with names for options. A
run with the same arguments takes place once in a session, so ask for what another test has asked for where that will
do. What no option can show, a function of drive.py watches from inside the script, and found() reads. What takes long
and seldom fails is marked `@pytest.mark.slow`, or is a case of with_all(); conftest.py has the options of the suite.
That is all: the rest of this file makes launch() fast.

launch() does what torchrun does, without its ten seconds of importing torch N + 1 times: zygote.py has imported it
once and forks the ranks, and the store at which they meet lives in this process. torchrun() is the real one, for the
tests of what a user sees of it; `pytest --torchrun` sends every launch() through it.
"""

import atexit
import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGES = ("stage0_ddp.py", "stage1_os.py", "stage2_grad.py", "stage3_param.py")
# Small, and nothing divides anything: every layer needs padding.
TINY = tuple(
    "--layers 2 --width 35 --heads 5 --vocab 257 --context 16 --batch 2 --steps 4 --compute float32".split()
)  # fmt: skip

folders = tempfile.TemporaryDirectory(prefix="zero-tests-")
# What runs came to, for all processes of a session: conftest.py hands the folder to the workers.
finished = os.environ.setdefault("ZERO_TESTS_FINISHED", tempfile.mkdtemp(dir=folders.name))
through_torchrun = False  # set by `pytest --torchrun`


@dataclasses.dataclass
class Run:
    """What came of a run: status 0 if every rank ended with 0, the output of all ranks, the records of the log."""

    status: int
    out: str
    err: str
    records: list

    def of(self, event):
        """The records of one kind. Only of a run that ended well."""
        assert self.status == 0, f"exit status {self.status}\n{self.out}\n{self.err}"
        return [record for record in self.records if record["event"] == event]


def tiny(stage, ranks=1, **options):
    """A run of the TINY model. All tests name its options here, in one order, so that they share runs."""
    options = {"dtype": "bfloat16", "collectives": "gloo", "micro_batches": 1} | options
    flags = ([f"--{name.replace('_', '-')}", value] for name, value in options.items())
    return launch(stage, *TINY, *(part for pair in flags for part in pair), ranks=ranks)


def progress(what):
    """What a long measurement is at, for whoever waits for it at a terminal."""
    if sys.stderr.isatty():
        print(what, file=sys.stderr, flush=True)


def with_all(*cases):
    """Cases of a test that --all adds."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def losses(run):
    return [record["loss"] for record in run.of("step")]


def norms(run):
    return [record["norm"] for record in run.of("step")]


def hashes(run):
    """sha256 of the fp32 masters at the start and at the end."""
    start, end = (record["sha256"] for record in run.of("weights"))
    return start, end


def found(run):
    """What the ranks of a run of drive.py told."""
    assert run.status == 0, run.err
    return [json.loads(line.removeprefix("found ")) for line in run.out.splitlines() if line.startswith("found ")]


def launch(script, *args, ranks=1, env=None, timeout=120, log=True, fresh=False):
    """Runs a script of the repository (or of any absolute path) on N ranks, one rank as without torchrun.

    A run with the same arguments is done once in a session, unless it is to be `fresh`: then it also goes through the
    whole shutdown of the interpreter. With `log` the script gets `--log-file` and a temporary file, for Run.records.
    """
    path = ROOT / script  # an absolute script stays what it is
    key = (str(path), path.stat().st_mtime_ns, tuple(map(str, args)), ranks, tuple((env or {}).items()), timeout, log)
    return run_now(*key, whole_exit=True) if fresh else run_once(*key)


@functools.cache
def run_once(*key):
    """With two workers (pytest-xdist) one runs it, and the other waits and reads."""
    with open(f"{finished}/{hashlib.sha256(repr(key).encode()).hexdigest()}", "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        stored = file.read()
        run = pickle.loads(stored) if stored else run_now(*key)
        if not stored:
            pickle.dump(run, file)
    return run


@functools.cache
def zygote():
    """One thread: the stage files set theirs, and numpy's library would start its own before the fork. Passive: threads
    that wait by spinning take all the time of a busy machine."""
    process = subprocess.Popen(
        [sys.executable, ROOT / "tests/zygote.py"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )  # fmt: skip
    atexit.register(lambda: (process.stdin.close(), process.wait()))
    return process


def run_now(script, _mtime, args, ranks, env, timeout, log, whole_exit=False):
    if through_torchrun:
        return subprocess_run(script, *args, ranks=ranks, env=dict(env), timeout=timeout, log=log)
    folder = tempfile.mkdtemp(dir=folders.name)
    environment, store = dict(env), None
    process = zygote()
    if ranks > 1:
        import torch.distributed as dist  # takes its time, meanwhile the zygote does the same

        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # port 0: any free one
        environment |= {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": "tests",
        }  # fmt: skip
    command = {
        "script": script, "args": [*args, *(["--log-file", f"{folder}/log"] if log else [])], "env": environment,
        "ranks": ranks if ranks > 1 else 0, "folder": folder, "timeout": timeout,
        "whole_exit": whole_exit,
    }  # fmt: skip
    for name in ("out", "err"):  # a rank may be ended before it opens them
        for rank in range(ranks):
            pathlib.Path(folder, f"{name}{rank}").touch()
    print(json.dumps(command), file=process.stdin, flush=True)
    answered = None
    while answered != folder:  # an earlier run may have been interrupted before its answer was read
        answered, statuses = json.loads(process.stdout.readline())
    out, err = ([pathlib.Path(folder, f"{name}{rank}").read_text() for rank in range(ranks)] for name in ("out", "err"))
    return Run(next(filter(None, statuses), 0), "".join(out), "".join(err), read_records(folder))


def torchrun(script, *args, ranks=2, timeout=120, log=True):
    """The same through the real torchrun, with nothing shared and nothing kept."""
    return subprocess_run(ROOT / script, *args, ranks=ranks, timeout=timeout, log=log, real=True)


def subprocess_run(script, *args, ranks, timeout, log, env=None, real=False):
    folder = tempfile.mkdtemp(dir=folders.name)
    args = [*args, *(["--log-file", f"{folder}/log"] if log else [])]
    process = start(script, *args, ranks=ranks if ranks > 1 or real else 0, env=env)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun hands it on to its ranks
    return Run(process.returncode, out, err, read_records(folder))


def start(script, *args, ranks, env=None):
    """Starts torchrun, or plain python where ranks is 0."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | (env or {})
    return subprocess.Popen(
        [sys.executable, *launcher, str(script), *map(str, args)], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def complaints(run):
    """What a real torchrun wrote to stderr, without its own word about OMP_NUM_THREADS and the box around that."""
    lines = (line.rpartition("]")[2].strip(" *") for line in run.err.splitlines())
    return [line for line in lines if line and not line.startswith("Setting OMP_NUM_THREADS")]


def read_records(folder):
    path = pathlib.Path(folder, "log")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
