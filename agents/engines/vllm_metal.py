"""vllm-metal: on a Mac sleep frees the KV cache alone, the weights stay where processor and GPU share memory.

0.3.0 has no sleep: it logs that it ignores the call, answers 200 and says that it sleeps. Its server tells vLLM's
version and not its own, so a release is judged by the footprint of its processes: what does not fall has no sleep.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final

import structlog

from ..errors import EngineRefused
from ..protocol.capabilities import Capabilities
from ..protocol.policy import EnginePolicy
from ..protocol.vllm_engines import VLLM_METAL
from .http_call import accepted
from .vllm import VllmAdapter
from .vllm_facts import SLEEP, WAKE_UP

log = structlog.get_logger(__name__)

_FALL_SECONDS_MAX: Final = 5.0
_FALL_POLL_SECONDS: Final = 0.05
_NO_FALL: Final = 409
_NO_SLEEP: Final = (
    "it says that it sleeps and its processes hold as much as before: this version has no sleep (0.3.0 ignores it);"
    " upgrade vllm-metal"
)


class VllmMetalAdapter(VllmAdapter):
    """The one level that there is, judged by what its processes hold before and after."""

    _has_no_sleep_of: str | None = None  # the incarnation that was found out

    async def capabilities(self) -> Capabilities:
        facts = await self._probe()
        unsupported = None
        if SLEEP not in facts.routes:
            unsupported = "vllm-metal cannot be parked: VLLM_SERVER_DEV_MODE=1 is not set, or this version has no sleep"
        elif self._has_no_sleep_of is not None and self._has_no_sleep_of == self._outside.incarnation:
            unsupported = f"vllm-metal cannot be parked: {_NO_SLEEP}"
        return VLLM_METAL.model_copy(update={"version": facts.version_text, "unsupported": unsupported})

    def level_of(self, policy: EnginePolicy) -> int:
        """Its level 1 is the KV cache."""
        del policy
        return 1

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        before = sum((await self._outside.held_bytes()).values())
        await super().park(policy, seconds_max)
        if before and not await self._falls_below(before):
            self._has_no_sleep_of = self._outside.incarnation
            accepted(await self._post(WAKE_UP, seconds_max))
            self._ledger.clear()
            raise EngineRefused(_NO_FALL, _NO_SLEEP)

    async def _falls_below(self, before_bytes: int) -> bool:
        deadline = time.monotonic() + _FALL_SECONDS_MAX
        while sum((await self._outside.held_bytes()).values()) >= before_bytes:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_FALL_POLL_SECONDS)
        return True
