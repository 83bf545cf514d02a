"""`python -m lull.vmm.service`: the memory service with the standard library alone, as an agent starts it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .command import ServiceSettings, run_service
from .holdings import Limits

_DEFAULT = Limits()


def main() -> int:
    parser = argparse.ArgumentParser(prog="lull memory-service", description=__doc__)
    parser.add_argument("--device", required=True, help="directory of a host-memory device, or UUID of a GPU")
    parser.add_argument("--socket", required=True, type=Path, help="Unix socket to listen on")
    parser.add_argument("--state-dir", type=Path, help="folder for log and pid file")
    parser.add_argument("--oom-wait-seconds-max", type=float, default=_DEFAULT.oom_wait_seconds_max)
    parser.add_argument("--copy-threads", type=int, default=2)
    given = parser.parse_args()
    limits = Limits(oom_wait_seconds_max=given.oom_wait_seconds_max)
    return run_service(
        ServiceSettings(
            device=given.device,
            socket=given.socket,
            state_dir=given.state_dir,
            copy_threads=given.copy_threads,
            limits=limits,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
