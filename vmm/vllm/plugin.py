"""The entry point `vllm.general_plugins`: makes `--sleep-mode-backend lull` known (vLLM 0.33; RFC #34303).

vLLM calls it in each of its processes, whether the back end is wanted or not, so it imports nothing of ours.
"""

from __future__ import annotations

import importlib
import logging
import weakref
from typing import Any, Final

BACKEND_NAME: Final = "lull"
_FACTORY_MODULE: Final = "vllm.device_allocator.sleep_mode_backend"

_log = logging.getLogger("vllm.lull")
_registered: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # factories: plug-ins may be loaded more than once


def register() -> None:
    """Nothing in versions that have no sleep back ends (before 0.25)."""
    try:
        module: Any = importlib.import_module(_FACTORY_MODULE)
    except ImportError:
        _log.debug("this vLLM has no sleep back ends; %s is not registered", BACKEND_NAME)
        return
    factory = module.SleepModeBackendFactory
    if factory in _registered:
        return
    factory.register_backend(BACKEND_NAME, "lull.vmm.vllm.sleep_backend", "LullSleepBackend")
    _registered.add(factory)
