"""What a node says of itself when it registers, so that the server decides as the node will: made, not started."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.daemon import Daemon
from lull.agents.protocol.wire import Register
from lull.agents.settings import AgentSettings


async def registered(root: Path, **gate: object) -> Register:
    engine = {"name": "a", "kind": "vllm", "models": ["m"], "url": "http://127.0.0.1:1", "device_indexes": [0]}
    settings = AgentSettings.model_validate(
        {
            "server_url": "http://127.0.0.1:1",
            "token_file": root / "token",
            "data_dir": root / "agent",
            "spawn_margin_bytes": "4KiB",
            "gateway": {"listen": "127.0.0.1:2"},
            "devices": [{"path": root / name, "capacity_bytes": 1 << 20} for name in ("device", "bare")],
            "engines": [{**engine, **gate}],
        }
    )
    daemon = Daemon(settings)
    try:
        return Register.model_validate_json((await daemon._make_register()).model_dump_json())
    finally:
        daemon.journal.close()
        daemon._lock.release()


async def test_the_bytes_that_are_kept_free_beside_a_job_are_told_of_every_device(tmp_path: Path) -> None:
    """A job that wants all of a bare device is given no more than this leaves."""
    told = await registered(tmp_path)
    assert [device.spawn_margin_bytes for device in told.devices] == [4096, 4096]


@pytest.mark.parametrize(
    ("gate", "tells"), [({}, True), ({"gate_kind": "none", "none": {}}, False)], ids=["gateway", "none"]
)
async def test_it_is_told_of_a_gate_whether_it_sees_requests(
    tmp_path: Path, gate: dict[str, object], tells: bool
) -> None:
    [declared] = (await registered(tmp_path, **gate)).engines
    assert declared.engine.tells_requests is tells
