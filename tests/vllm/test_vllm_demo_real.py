"""`lull demo --engine vllm`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.real_vllm import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


def test_the_demo_lends_a_real_vllm(tmp_path_factory: pytest.TempPathFactory) -> None:
    place: Path = tmp_path_factory.mktemp("d")  # short, for Unix sockets
    environment = {**os.environ, "TMPDIR": str(place), "LULL_VLLM_PYTHON": vllm_python(), "CXX": "no-compiler"}
    argv = [sys.executable, "-P", "-m", "lull.cli", "demo", "--engine", "vllm", "--json"]
    ended = subprocess.run(argv, env=environment, cwd=place, capture_output=True, text=True, timeout=1400, check=False)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    document = json.loads(ended.stdout)
    assert document["failures"] == []
    assert document["engine_lent"] == "alpha"
    assert document["engine_device_bytes_parked"] == 0
    assert document["engine_device_bytes_after"] == document["engine_device_bytes_before"] > 64 << 20
    assert document["requests_failed"] == 0
    assert list(place.iterdir()) == [], "nothing is left behind"
