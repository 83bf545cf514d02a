"""Commands of an operator whose engine is a unit that is stopped and started, as by systemctl or docker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.waiting import wait_until

RUNNING, PARKED, CHANGING = 0, 10, 11


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except OSError:
        return False
    return True


def has_ended(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


def main(verb: str, root: Path) -> int:
    """``root/argv.json`` is what the unit runs; ``root/pid`` its process."""
    stopped, url = root / "stopped", os.environ["LULL_ENGINE_URL"]
    if verb == "observe":
        return PARKED if stopped.exists() else RUNNING if answers(url) else CHANGING
    if verb == "park":
        pid = int(os.environ["LULL_ENGINE_PID"])
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: has_ended(pid), 20, "its end")
        stopped.touch()
        return RUNNING
    nowhere = subprocess.DEVNULL
    child = subprocess.Popen(
        json.loads((root / "argv.json").read_text()),
        stdin=nowhere,
        stdout=nowhere,
        stderr=nowhere,
        start_new_session=True,
    )
    (root / "pid").write_text(str(child.pid))
    stopped.unlink(missing_ok=True)
    wait_until(lambda: answers(url), 30, "its start")
    return RUNNING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
