"""Fixtures for every test. Databases are in ``tests/databases.py``; one session has one PostgreSQL."""

from __future__ import annotations

import signal

pytest_plugins = ["tests.databases", "tests.fake_cuda.fixtures"]

# A shell starts what it runs in the background with SIGINT ignored, and whatever a test starts would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
