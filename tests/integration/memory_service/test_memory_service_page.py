"""The examples of docs/memory-service.md, as they stand there, in processes of their own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from lull.vmm.service.client import drop_pool
from tests.doc_examples import example
from tests.integration.memory_service.conftest import World
from tests.waiting import wait_until

LAYERS = "['layer0', 'layer1', 'layer2']"


def test_the_first_process_loads_and_the_second_attaches(world: World, tmp_path: Path) -> None:
    script = tmp_path / "share.py"
    script.write_text(example("memory-service.md"))
    argv = [sys.executable, str(script), str(world.device.path), str(world.service.socket)]
    with ExitStack() as stack:
        engines: list[subprocess.Popen[str]] = []
        for came in ("loaded", "attached"):
            engine = stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            engines.append(engine)
            stack.callback(engine.kill)
            assert engine.stdout is not None
            assert engine.stdout.readline() == f"{came} {LAYERS} True\n"
        for engine in engines:
            said, _ = engine.communicate("\n", timeout=60)
            assert (engine.returncode, said) == (0, "after park and wake: True\n")
    name = "tiny/uint8/rank0"
    wait_until(lambda: world.service.pool(name)["state"] == "committed", 10, "both have left, and the weights stay")
    drop_pool(world.service.socket, name)


def test_data_is_built_once_and_adopted_afterwards(world: World, tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text(example("memory-service.md", containing="DataPool("))
    argv = [sys.executable, str(script), str(world.device.path), str(world.service.socket)]
    for came in ("built", "adopted"):
        said = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.startswith(f"{came} torn: ()"), said
    drop_pool(world.service.socket, "tiny/kv/rank0")
