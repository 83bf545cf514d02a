"""An operator's own park, resume and observe commands, for an engine that sleeps by HTTP, and their faults."""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path

DONE, PARKED, REFUSED, CHANGING = 0, 10, 10, 11


def main(verb: str, faults_file: str) -> int:
    faults = json.loads(Path(faults_file).read_text())
    url = os.environ["LULL_ENGINE_URL"]
    if f"{verb}_hangs" in faults:
        threading.Event().wait()
    if f"{verb}_refuses" in faults:
        print("not now: somebody is looking at it")
        return REFUSED
    if f"{verb}_fails" in faults:
        print("the hypervisor did not answer")
        return 1
    if f"{verb}_lies" in faults:
        return DONE
    try:
        if verb == "observe":
            with urllib.request.urlopen(f"{url}/is_sleeping", timeout=5) as reply:
                return PARKED if json.load(reply)["is_sleeping"] else DONE
        path = {"park": "/sleep?level=1", "resume": "/wakeup"}[verb]
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(url + path, data=b"{}", method="POST", headers=headers)
        urllib.request.urlopen(request, timeout=30).close()
    except OSError as error:
        print(error)
        return CHANGING if verb == "observe" else 1
    return DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
