"""How a run ends: with status 0 every time, or with the reason within seconds."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from launch import ROOT, STAGES, TINY, found, launch, start, torchrun


def test_every_run_ends_well(request):
    """`pytest --runs 100` looks closer, and with `--torchrun` too at what a user runs."""
    for _ in range(request.config.getoption("--runs")):
        run = launch(STAGES[1], *TINY, "--steps", 2, ranks=3, fresh=True)
        assert (run.status, run.err) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
def test_no_thread_of_gloo_is_left():
    """One that outlives the interpreter may abort it: "terminate called without an active exception". Through torchrun,
    because it depends on what is imported when."""
    ranks = found(torchrun("tests/drive.py", "threads", STAGES[1], *TINY, "--steps", 2))
    assert len(ranks) == 2
    for rank in ranks:
        assert not [name for name in rank["threads"] if "gloo" in name]


def test_python_alone_says_nothing_on_stderr():
    process = start(ROOT / STAGES[0], *TINY, ranks=0)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "Memory of each rank" in out


def test_a_killed_rank_ends_the_job_and_leaves_whole_lines(tmp_path):
    log = tmp_path / "log"
    job = start(ROOT / STAGES[3], *TINY, "--steps", 1_000_000, "--log-file", log, ranks=2)
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_bytes().count(b"\n") > 20):
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        command = ["pgrep", "-P", str(job.pid), "-f", STAGES[3]]
        first, _ = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        os.kill(int(first), signal.SIGKILL)
        _, err = job.communicate(timeout=20)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0 and "SIGKILL" in err
    text = log.read_text()
    assert text.endswith("}\n") and all(json.loads(line)["event"] for line in text.splitlines())
