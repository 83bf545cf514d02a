from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.vmm.tags import RestoreMode
from lull.vmm.vllm.settings import settings_of

ONE = {"LULL_HOST_DEVICE": "/run/a"}


def test_the_environment_says_it_and_additional_config_wins() -> None:
    environment = {**ONE, "LULL_RESTORE_MODES": "model_weights=PINNED, kv_cache=MEMSET", "LULL_IMMUTABLE_WEIGHTS": "1"}
    said = settings_of(environment, {})
    assert said.restore_modes == {"model_weights": RestoreMode.PINNED, "kv_cache": RestoreMode.MEMSET}
    assert said.immutable_weights
    assert said.device_of(0) == Path("/run/a")
    section = {"device": "/run/b", "restore_modes": {"model_weights": "CPU"}, "immutable_weights": False}
    said = settings_of(environment, {"lull": section, "other": 1})
    assert said.restore_modes == {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.MEMSET}
    assert not said.immutable_weights
    assert said.device_of(0) == Path("/run/b")


def test_one_device_is_for_all_ranks_and_several_are_one_for_each() -> None:
    assert settings_of(ONE, None).device_of(3) == Path("/run/a")
    two = settings_of({"LULL_HOST_DEVICE": "/run/a:/run/b"}, {})
    assert [two.device_of(rank) for rank in (0, 1)] == [Path("/run/a"), Path("/run/b")]
    with pytest.raises(ValueError, match="names 2 devices and this is rank 2"):
        two.device_of(2)
    with pytest.raises(ValueError, match="LULL_HOST_DEVICE is not set"):
        settings_of({}, {}).device_of(0)


@pytest.mark.parametrize(
    ("environment", "config", "says"),
    [
        ({"LULL_RESTORE_MODES": "model_weights"}, {}, "LULL_RESTORE_MODES has 'model_weights'"),
        ({"LULL_RESTORE_MODES": "weights=CPU"}, {}, "restore_modes.weights: no such tag"),
        ({"LULL_RESTORE_MODES": "model_weights=cpu"}, {}, "restore_modes.model_weights is 'cpu'"),
        ({"LULL_RESTORE_MODES": "kv_cache=CPU"}, {}, "a copy would serve nobody"),
        ({"LULL_IMMUTABLE_WEIGHTS": "yes"}, {}, "LULL_IMMUTABLE_WEIGHTS is 'yes'"),
        ({"LULL_IMMUTABLE_WEIGHTS": "1", "LULL_RESTORE_MODES": "model_weights=NONE"}, {}, "no backup to be kept"),
        ({}, {"lull": []}, "lull is \\[\\]"),
        ({}, {"lull": {"devise": "/run/a"}}, "lull.devise: no such field"),
        ({}, {"lull": {"device": 3}}, "lull.device is 3"),
        ({}, {"lull": {"restore_modes": "CPU"}}, "lull.restore_modes is 'CPU'"),
        ({}, {"lull": {"immutable_weights": 1}}, "lull.immutable_weights is 1"),
    ],
)
def test_what_makes_no_sense_is_named(environment: dict[str, str], config: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        settings_of({**ONE, **environment}, config)
