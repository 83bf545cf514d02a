"""Fixtures for every test. Databases are in ``tests/databases.py``; one session has one PostgreSQL."""

from __future__ import annotations

pytest_plugins = ["tests.databases", "tests.fake_cuda.fixtures"]
