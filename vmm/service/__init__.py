"""Pools of device memory that outlive their engines: a process per device owns them, engines attach over a socket."""

from __future__ import annotations
