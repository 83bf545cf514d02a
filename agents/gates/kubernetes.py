"""The gate that is a pod's readiness gate, a label that services select by, or both.

A condition that is "False" makes the pod unready, whatever its probes say; kubelet, the EndpointSlice controller and
kube-proxy follow one after the other. So closed means that no EndpointSlice of the services has the pod as ready any
more, and then a time for those who follow the slices, which nobody can observe. Nothing in Kubernetes counts requests:
the engine's gauges do, or a time that the operator grants.

A pod that is replaced has no such condition, which counts as "False": it gets no traffic until its engine is proved.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Final

from ..protocol.wire import GateState
from .base import ClosedTerms, GateObservation, GateRefused, GateUnreachable
from .counting import Counter
from .kubernetes_api import Conflict, KubernetesApi, Pod
from .sections import KubernetesSection

_CONFLICTS_MAX: Final = 5
_POLL_SECONDS_FIRST: Final = 0.05
_POLL_SECONDS_MAX: Final = 1.0


class KubernetesGate:
    """Gate over one pod. ``now``: the wall clock, for the condition's time of change."""

    def __init__(
        self,
        section: KubernetesSection,
        counter: Counter,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._section = section
        self._api = KubernetesApi(section)
        self._counter = counter
        self._now = now

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        """The pod exists, and has the readiness gate: GateRefused if not. Its template alone can give it one."""
        pod = await self._pod()
        condition = self._section.condition
        if condition is not None and condition not in pod.readiness_gates:
            raise GateRefused(
                f"pod {pod.name} has no readiness gate {condition}: add it to readinessGates of the pod's template"
            )

    async def remove_route(self, engine_id: str) -> None:
        """The pod is its owner's."""

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        """How requests fare meanwhile is up to the service: another pod answers, or none."""
        pod, changed = await self._set(is_open=False)
        if changed:
            self._counter.opened()
        listed = await self._until_listed(pod, wanted=False)
        if changed or listed:
            self._counter.opened()
            await asyncio.sleep(self._section.propagation_seconds)
        self._counter.closed()
        return await self._counter.in_flight_if_told()

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        left = await self._counter.wait_drained(seconds)
        state = (await self.observe(engine_id)).state
        if state is not GateState.CLOSED:
            raise GateUnreachable(f"the pod was closed and is {state} now")
        return left

    async def abort(self, engine_id: str) -> None:
        """GateRefused: nothing here holds a request's connection."""
        raise GateRefused("gate_kind 'kubernetes' cannot abort requests; set on_drain_deadline = \"abort_loan\"")

    async def open(self, engine_id: str) -> None:
        self._counter.opened()
        pod, _ = await self._set(is_open=True)
        await self._until_listed(pod, wanted=True)

    async def observe(self, engine_id: str) -> GateObservation:
        pod = await self._pod()
        listed = [await self._api.lists_as_ready(service, pod) for service in self._section.services]
        state = GateState.UNKNOWN
        if self._is(pod, is_open=True) and all(listed):
            state = GateState.OPEN
        elif self._is(pod, is_open=False) and not any(listed):
            state = GateState.CLOSED
        if state is not GateState.CLOSED:
            self._counter.opened()
        return GateObservation(state=state, in_flight=None, held=0)

    # ---- the pod ----------------------------------------------------------------------------------------------

    async def _pod(self) -> Pod:
        section = self._section
        if section.pod is not None:
            return await self._api.pod(section.pod)
        assert section.pod_selector is not None
        found = await self._api.pods(section.pod_selector, section.node)
        if len(found) != 1:
            names = ", ".join(sorted(pod.name for pod in found)[:5]) or "none"
            raise GateRefused(f"pod_selector {section.pod_selector!r} finds {len(found)} pods ({names}), not one")
        return found[0]

    def _is(self, pod: Pod, *, is_open: bool) -> bool:
        """Condition and label are as they have to be. Both: what lets traffic through is an open one alone."""
        section = self._section
        said: list[bool] = []
        if section.condition is not None:
            said.append(pod.conditions.get(section.condition) == "True")
        if section.label is not None:
            said.append(pod.labels.get(section.label) == section.label_value)
        return all(one is is_open for one in said)

    async def _set(self, *, is_open: bool) -> tuple[Pod, bool]:
        """Makes condition and label so, reads them back; the pod, and whether anything had to be changed."""
        changed = False
        for _ in range(_CONFLICTS_MAX):
            pod = await self._pod()
            if self._is(pod, is_open=is_open):
                return pod, changed
            changed = True
            try:
                await self._patch(pod, is_open=is_open)
            except Conflict:
                continue  # somebody changed the pod since it was read
        raise GateUnreachable(f"the pod did not become {'open' if is_open else 'closed'} in {_CONFLICTS_MAX} tries")

    async def _patch(self, pod: Pod, *, is_open: bool) -> None:
        section = self._section
        if section.condition is not None and (pod.conditions.get(section.condition) == "True") is not is_open:
            condition = {
                "type": section.condition,
                "status": "True" if is_open else "False",
                "reason": "EngineServes" if is_open else "EngineAway",
                "message": "set by lull: the engine is verified" if is_open else "set by lull: the engine is away",
                "lastTransitionTime": self._now().strftime("%Y-%m-%dT%H:%M:%SZ"),
            }
            pod = await self._api.patch_condition(pod, condition)
        if section.label is not None and (pod.labels.get(section.label) == section.label_value) is not is_open:
            await self._api.patch_label(pod, section.label, section.label_value if is_open else None)

    async def _until_listed(self, pod: Pod, *, wanted: bool) -> bool:
        """Waits until every service lists the pod as ready, or none does; whether that took more than one look."""
        loop = asyncio.get_running_loop()
        deadline, pause, waited = loop.time() + self._section.endpoint_seconds_max, _POLL_SECONDS_FIRST, False
        while True:
            odd = [
                service
                for service in self._section.services
                if await self._api.lists_as_ready(service, pod) is not wanted
            ]
            if not odd:
                return waited
            if loop.time() >= deadline:
                still = "does not list" if wanted else "still lists"
                raise GateUnreachable(
                    f"service {odd[0]} {still} pod {pod.name} as ready after {self._section.endpoint_seconds_max:g} s"
                )
            waited = True
            await asyncio.sleep(pause)
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)
