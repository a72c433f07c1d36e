"""How a run ends: with status 0 every time, or with the reason within seconds."""

import json
import os
import signal
import subprocess
import time

import pytest
from launch import ROOT, STAGES, TINY, launch, start


def test_every_run_ends_well(request):
    """gloo's threads must be gone before the interpreter is: pytest --runs 100 looks closer."""
    for _ in range(request.config.getoption("--runs")):
        run = launch(STAGES[1], *TINY, "--steps", 2, ranks=3, fresh=True)
        assert (run.status, run.err) == (0, "")


@pytest.mark.parametrize("stage", STAGES[:1])
def test_python_alone_says_nothing_on_stderr(stage):
    out, err = (process := start(ROOT / stage, *TINY, ranks=0)).communicate(timeout=60)
    assert (process.returncode, err) == (0, "") and "Memory of each rank" in out


def test_a_killed_rank_ends_the_job_and_leaves_whole_lines(tmp_path):
    log = tmp_path / "log"
    job = start(ROOT / STAGES[3], *TINY, "--steps", 1_000_000, "--log-file", log, ranks=2)
    try:
        deadline = time.monotonic() + 60
        while job.poll() is None and time.monotonic() < deadline and not (log.exists() and log.read_bytes().count(b"\n") > 20):
            time.sleep(0.1)
        ranks = subprocess.run(["pgrep", "-P", str(job.pid), "-f", STAGES[3]], capture_output=True, text=True).stdout.split()
        assert len(ranks) == 2
        os.kill(int(ranks[0]), signal.SIGKILL)
        _, err = job.communicate(timeout=20)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0 and "SIGKILL" in err
    text = log.read_text()
    assert text.endswith("}\n") and all(json.loads(line)["event"] for line in text.splitlines())
