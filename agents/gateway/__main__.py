"""Runs the gateway: `python -m lull.agents.gateway`."""

from __future__ import annotations

import typer

from .command import gateway

if __name__ == "__main__":
    typer.run(gateway)
