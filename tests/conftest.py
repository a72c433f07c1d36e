"""Options of this test suite. The harness is launch.py."""

import launch


def pytest_addoption(parser):
    parser.addoption("--torchrun", action="store_true", help="start every run with the real torchrun (slow)")
    parser.addoption("--runs", type=int, default=10, help="how often the test of the exit status runs (default: 10)")
    parser.addoption(
        "--slow-link", action="store_true", help="time the overlap on a slow link (as root; on an idle machine)"
    )


def pytest_configure(config):
    launch.through_torchrun = config.getoption("--torchrun")
