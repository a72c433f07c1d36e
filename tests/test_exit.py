"""How a run ends: with status 0 every time, or with the reason within seconds."""

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from launch import ROOT, STAGES, TINY, found, launch, start, torchrun, with_all


def test_every_run_ends_well(request):
    """`pytest --runs 100` looks closer, and with `--torchrun` too at what a user runs."""
    for _ in range(request.config.getoption("--runs")):
        run = launch(STAGES[1], *TINY, "--steps", 2, ranks=3, fresh=True)
        assert (run.status, run.err) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads of a process from /proc")
@pytest.mark.parametrize("options", [(STAGES[1],), *with_all((("zero_r.py", "--mp", 2),))], ids=["stage", "zero_r"])
def test_no_thread_of_gloo_is_left(options):
    """One that outlives the interpreter may abort it: "terminate called without an active exception". Through torchrun,
    because it depends on what is imported when."""
    script, *options = options
    ranks = found(
        torchrun("tests/drive.py", "threads", script, *TINY, "--steps", 2, "--heads", 2, "--width", 34, *options)
    )
    assert len(ranks) == 2
    for rank in ranks:
        assert not [name for name in rank["threads"] if "gloo" in name]


def test_python_alone_says_nothing_on_stderr():
    """Nor does `python -X dev`, which warns of a file that is never closed."""
    process = start(ROOT / STAGES[0], *TINY, ranks=0, env={"PYTHONDEVMODE": "1"})
    out, err = process.communicate(timeout=180)
    assert (process.returncode, err) == (0, "") and "Memory of each rank" in out


def test_torchrun_prints_the_help_once():
    run = launch(STAGES[2], "--help", ranks=3, log=False)
    assert (run.status, run.err) == (0, "") and run.out.count("usage: ") == 1


@pytest.mark.parametrize(("script", "by"), [(STAGES[0], "Ctrl-C"), *with_all(("zero_r.py", "head -1"))])
def test_it_ends_as_any_other_program(script, by):
    process = start(ROOT / script, *TINY, "--steps", 1_000_000, ranks=0)
    try:
        while not process.stdout.readline().startswith("step"):
            assert process.poll() is None
        if by == "Ctrl-C":
            process.send_signal(signal.SIGINT)
        process.stdout.close()  # as `head` does when it has read enough
        ended = process.wait(timeout=60)
    finally:
        process.kill()
    assert ended == -(signal.SIGINT if by == "Ctrl-C" else signal.SIGPIPE)
    assert process.stderr.read() == ""


@pytest.mark.parametrize(
    "options",
    [(STAGES[3],), *with_all((("zero_r.py", "--mp", 2, "--heads", 2, "--width", 34),))],
    ids=["stage", "zero_r"],
)
def test_a_stopped_rank_ends_the_job(options):
    """One that has died closes its connections, one that is stuck does not."""
    script, *options = options
    run = launch("tests/drive.py", "stopped", script, *TINY, *options, ranks=2, timeout=45)
    # It is gloo's exception that ends rank 0, in one of two wordings, and not this test's limit.
    assert run.status == 1 and ("imed out" in run.err or "Application timeout" in run.err)


# ---- Two nodes, each started by a command of its own ----


@pytest.mark.parametrize("node", (0, 1))
@pytest.mark.parametrize("script", (STAGES[2], "zero_r.py"))
def test_a_log_file_on_one_node_alone(script, node, tmp_path):
    env = {"ON": str(node), "ALONE": f"--log-file {tmp_path}/log"}
    run = launch("tests/drive.py", "differing", script, *TINY, ranks=2, env=env, log=False)
    assert (run.status, run.err) == (0, "")
    assert (tmp_path / "log").exists() == (node == 0)  # rank 0 writes


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ("--seed 5", "--seed differs between the ranks: 0 on rank 0, 5 elsewhere"),
        ("--lr 0.5", "--lr differs between the ranks: 0.001 on rank 0, 0.5 elsewhere"),
        ("--data README.md", "--data differs between the ranks"),
    ],
)
def test_two_nodes_that_differ(alone, said):
    """They would train two models on one gradient, in silence."""
    run = launch(
        "tests/drive.py", "differing", STAGES[1], *TINY, "--lr", 0.001, ranks=2, env={"ON": "1", "ALONE": alone}
    )
    (line,) = run.err.splitlines()
    assert run.status != 0 and said in line


@pytest.mark.slow
def test_two_nodes():
    """Two torchrun agents that meet at a port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = f"--nnodes 2 --nproc-per-node 1 --rdzv-id zero --rdzv-backend c10d --rdzv-endpoint localhost:{port}"
    command = [sys.executable, "-m", "torch.distributed.run", *options.split(), STAGES[3], *TINY]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    nodes = [subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes) for _ in range(2)]
    try:
        outputs = [node.communicate(timeout=120) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    assert [node.returncode for node in nodes] == [0, 0], outputs
    (out,) = (out for out, _ in outputs if out)  # rank 0 speaks, on whichever node it is
    assert "2 ranks on" in out or "2 data-parallel ranks on" in out
    assert "Memory of each rank" in out


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
