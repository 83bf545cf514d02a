"""The one command for GPU tests works before it meets a GPU: on the fake driver, and where there is no device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fake_cuda.library import GRANULE_BYTES, environment

COMMAND = Path(__file__).parent.parent.parent / "gpu" / "run.py"


def run(folder: Path, *arguments: str, devices: int) -> tuple[int, str]:
    fake = environment(folder, granules=96, devices=devices, strict=True)
    ended = subprocess.run(
        [sys.executable, str(COMMAND), *arguments],
        env={**os.environ, **fake, "LULL_TEST_GPU_UNIT_BYTES": str(GRANULE_BYTES)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended.returncode, ended.stdout


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    code, text = run(tmp_path, devices=0)
    assert (code, text) == (3, "no GPU test was run: the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?)\n")


def test_it_ends_in_a_table(tmp_path: Path) -> None:
    code, text = run(tmp_path, "driver", "-k", "release_twice", "--json", str(tmp_path / "table.json"), devices=1)
    *_, head, row, counts = text.splitlines()
    assert code == 0, text
    assert head.split() == ["group", "case", "outcome", "s"]
    assert row.split()[:3] == ["driver", "test_release_twice_is_an_error[gpu]", "passed"]
    assert counts == "1 passed, 0 failed, 0 skipped, 0 not run"
    assert '"outcome": "passed"' in (tmp_path / "table.json").read_text()
