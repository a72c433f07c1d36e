"""Options of this test suite. The harness is launch.py, and its first paragraph says how a test is written."""

import datetime
import os

import launch
import pytest


def pytest_addoption(parser):
    parser.addoption("--all", action="store_true", help="also what takes long and seldom fails")
    parser.addoption("--fuzz", type=int, default=2, help="so many random configurations (default: 2)")
    parser.addoption("--fuzz-seed", default=datetime.date.today().isoformat(), help="of which these (default: today)")
    parser.addoption("--gpus", action="store_true", help="use the GPUs of this machine, which are hidden otherwise")
    parser.addoption("--runs", type=int, default=3, help="how often the test of the exit status runs (default: 3)")
    parser.addoption("--torchrun", action="store_true", help="start every run with the real torchrun (slow)")
    parser.addoption(
        "--slow-link", action="store_true", help="time the overlap on a slow link (as root; on an idle machine)"
    )


def pytest_configure(config):
    launch.through_torchrun = config.getoption("--torchrun")
    if not config.getoption("--gpus"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # bits and bytes are compared with those of a CPU


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="--all runs it"))
