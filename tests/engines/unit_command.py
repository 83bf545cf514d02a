"""Commands of an operator whose engine is a unit that is stopped and started, as by systemctl or docker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

RUNNING, PARKED, CHANGING = 0, 10, 11


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=2).close()
    except OSError:
        return False
    return True


def main(verb: str, root: Path) -> int:
    """``root/argv.json`` is what the unit runs; ``root/pid`` its process."""
    stopped, url = root / "stopped", os.environ["LULL_ENGINE_URL"]
    if verb == "observe":
        return PARKED if stopped.exists() else RUNNING if answers(url) else CHANGING
    if verb == "park":
        pid = int(os.environ["LULL_ENGINE_PID"])
        os.kill(pid, signal.SIGTERM)
        while os.path.exists(f"/proc/{pid}") and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            time.sleep(0.01)
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
    while not answers(url):
        time.sleep(0.02)
    return RUNNING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
