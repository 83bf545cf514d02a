"""The console script. It imports nothing but the standard library until it knows that the extra is there."""

from __future__ import annotations

import sys
from importlib import import_module


def main() -> None:
    """Run the command line; without the `cli` extra say what to install."""
    try:
        for needed in ("typer", "pydantic", "httpx"):
            import_module(needed)
    except ModuleNotFoundError as missing:
        print(f"lull: the command line is not installed (no module {missing.name!r}).", file=sys.stderr)
        print("Install it with:  pip install 'gpu-lull[cli]'", file=sys.stderr)
        raise SystemExit(1) from None
    from .app import run

    run()


if __name__ == "__main__":
    main()
