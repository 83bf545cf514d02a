"""One rig for each kind of gate: the other side as it is, and what may happen to it."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from lull.agents.gates.base import Gate
from lull.agents.gates.counting import Counter
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gates.haproxy import HaproxyGate
from lull.agents.gates.haproxy_backed import BackedHaproxyGate
from lull.agents.gates.kubernetes import KubernetesGate
from lull.agents.gates.none import NoGate
from lull.agents.gates.sections import HaproxySection, KubernetesSection, NoneSection, WebhookSection
from lull.agents.gates.webhook import WebhookGate
from lull.agents.gateway.process import Gateway
from lull.agents.gateway.settings import GatewaySettings, Limits
from tests.agent_node import free_port
from tests.gates.haproxies import Haproxy
from tests.gates.kubernetes_server import NAMESPACE, TOKEN, FakePod, KubernetesServer
from tests.gates.metered_engine import MeteredEngine
from tests.gates.webhook_server import SECRET, WebhookServer
from tests.waiting import wait_until_async

ENGINE_ID = "engine-1"
MODELS = ["m"]
CALL_SECONDS = 0.5


class GateRig:
    """A gate of one kind over an engine with real requests. What a kind cannot do, its rig has not."""

    may_open_by_itself = True
    can_be_silent = True
    can_abort = True
    in_flight_in_looks = True  # what observe says
    engine_counts = False  # by its gauges

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engine = MeteredEngine()
        self._asked: list[asyncio.Task[int]] = []

    # ---- the other side -----------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self.engine.start()
        await self.start_other_side()

    async def stop(self) -> None:
        self.engine.go.set()
        await asyncio.gather(*self._asked, return_exceptions=True)
        await self.stop_other_side()
        await self.engine.stop()

    async def start_other_side(self) -> None: ...
    async def stop_other_side(self) -> None: ...

    def gate(self) -> Gate:
        """As the next agent makes it: it knows nothing of what was asked before."""
        raise AssertionError

    def wrong(self) -> Gate | None:
        """One whose name or path on the other side is wrong."""
        return None

    async def go_silent(self) -> None:
        """The other side ends."""

    async def come_back(self) -> None:
        """It is there again; what it was told may be lost."""

    async def hang(self) -> None: ...
    async def unhang(self) -> None: ...

    async def open_by_itself(self) -> None:
        """Somebody or something opens what the agent closed."""

    # ---- clients ------------------------------------------------------------------------------------------------

    @property
    def clients_url(self) -> str:
        return self.engine.url

    async def ask(self, **body: Any) -> int:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{self.clients_url}/v1/completions", json={"model": "m", **body}) as answer,
        ):
            await answer.read()
            return answer.status

    async def begin(self) -> asyncio.Task[int]:
        """A request that is in flight when this returns."""
        before = self.engine.running
        task = asyncio.create_task(self.ask())
        self._asked.append(task)
        await wait_until_async(lambda: self.engine.running == before + 1, 10, "the request is in flight")
        return task

    async def routed(self) -> Gate:
        gate = self.gate()
        await gate.ensure_route(ENGINE_ID, "alpha", MODELS, self.engine.url)
        return gate


async def start_gateway(folder: Path, port: int) -> Gateway:
    settings = GatewaySettings(
        host="127.0.0.1",
        port=port,
        control=folder / "gateway.sock",
        state_dir=folder / "gateway",
        pid_file=folder / "gateway.pid",
        limits=Limits(stop_seconds_max=1.0, abort_seconds_max=0.5),
    )
    gateway = Gateway(settings)
    await gateway.start()
    return gateway


async def stop_gateway(gateway: Gateway) -> None:
    hurry = asyncio.Event()
    hurry.set()
    await gateway.stop(hurry)


class GatewayRig(GateRig):
    may_open_by_itself = False

    async def start_other_side(self) -> None:
        self.port = free_port()
        self._gateway = await start_gateway(self.folder, self.port)

    async def stop_other_side(self) -> None:
        if (self.folder / "gateway.sock").exists():
            await stop_gateway(self._gateway)

    def gate(self) -> Gate:
        return GatewayGate(self.folder / "gateway.sock", call_seconds_max=CALL_SECONDS)

    async def go_silent(self) -> None:
        await self.stop_other_side()

    async def come_back(self) -> None:
        self._gateway = await start_gateway(self.folder, self.port)

    @property
    def clients_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


class HaproxyRig(GateRig):
    """HAProxy alone: closed, it answers 503."""

    count = 1
    backup_port: int | None = None

    async def start_other_side(self) -> None:
        self.haproxies = [
            Haproxy(self.folder, free_port(), self.engine.port, backup_port=self.backup_port).start()
            for _ in range(self.count)
        ]

    async def stop_other_side(self) -> None:
        for haproxy in self.haproxies:
            haproxy.stop()

    def section(self, **more: Any) -> HaproxySection:
        return HaproxySection.model_validate(
            {
                "sockets": [str(haproxy.socket) for haproxy in self.haproxies],
                "backend": "llm",
                "old_worker_seconds_max": 0,
                "call_seconds_max": CALL_SECONDS,
                **more,
            }
        )

    def gate(self) -> Gate:
        return HaproxyGate(self.section(), "alpha")

    def wrong(self) -> Gate | None:
        return HaproxyGate(self.section(server="beta"), "alpha")

    async def go_silent(self) -> None:
        self.haproxies[-1].stop()

    async def come_back(self) -> None:
        self.haproxies[-1].start()

    async def hang(self) -> None:
        self.haproxies[-1].freeze()

    async def unhang(self) -> None:
        self.haproxies[-1].thaw()

    async def open_by_itself(self) -> None:
        self.haproxies[-1].restart()  # it comes up as its file says

    @property
    def clients_url(self) -> str:
        return self.haproxies[0].url


class TwoHaproxiesRig(HaproxyRig):
    count = 2


class BackedHaproxyRig(HaproxyRig):
    """HAProxy in front, the gateway as its backup server."""

    async def start_other_side(self) -> None:
        self.backup_port = free_port()
        self._gateway = await start_gateway(self.folder, self.backup_port)
        await super().start_other_side()

    async def stop_other_side(self) -> None:
        await super().stop_other_side()
        await stop_gateway(self._gateway)

    def backed(self, section: HaproxySection) -> Gate:
        assert self.backup_port is not None
        front = HaproxyGate(section, "alpha")
        return BackedHaproxyGate(front, GatewayGate(self.folder / "gateway.sock"), self.backup_port)

    def gate(self) -> Gate:
        return self.backed(self.section())

    def wrong(self) -> Gate | None:
        return self.backed(self.section(server="beta"))


class KubernetesRig(GateRig):
    """A readiness gate and a label, both."""

    can_abort = False
    in_flight_in_looks = False
    engine_counts = True
    condition: str | None = "lull.dev/serving"
    label: str | None = "lull.dev/serving"

    async def start_other_side(self) -> None:
        selector = {"app": "vllm"} if self.label is None else {"app": "vllm", self.label: "true"}
        self.server = KubernetesServer({"vllm": selector, "vllm-admin": {"app": "vllm"}})
        self.pod = self.server.add(
            FakePod("vllm-0", "uid-1", {"app": "vllm"}, [] if self.condition is None else [self.condition])
        )
        self.server.add(FakePod("other-0", "uid-2", {"app": "vllm"}, []))
        await self.server.start()
        (self.folder / "token").write_text(TOKEN + "\n")

    async def stop_other_side(self) -> None:
        await self.server.stop()
        assert self.server.odd == []

    def section(self, **more: Any) -> KubernetesSection:
        return KubernetesSection.model_validate(
            {
                "api_url": self.server.url,
                "token_file": self.folder / "token",
                "namespace": NAMESPACE,
                "pod": "vllm-0",
                "services": ["vllm"] if self.condition is None else ["vllm", "vllm-admin"],
                "condition": self.condition,
                "label": self.label,
                "endpoint_seconds_max": 2.0,
                "propagation_seconds": 0,
                "call_seconds_max": CALL_SECONDS,
                **more,
            }
        )

    def made(self, **more: Any) -> KubernetesGate:
        section = self.section(**more)
        return KubernetesGate(section, Counter(self.engine.url, "vllm", section))

    def gate(self) -> Gate:
        return self.made()

    def wrong(self) -> Gate | None:
        return self.made(pod="vllm-9")

    async def go_silent(self) -> None:
        await self.server.stop()

    async def come_back(self) -> None:
        await self.server.start()

    async def hang(self) -> None:
        self.server.hangs.clear()

    async def unhang(self) -> None:
        self.server.hangs.set()

    async def open_by_itself(self) -> None:
        if self.condition is not None:
            self.pod.conditions[self.condition] = "True"
        if self.label is not None:
            self.pod.labels[self.label] = "true"
        self.server.changed(self.pod)
        self.server.follow()


class ConditionRig(KubernetesRig):
    label = None


class LabelRig(KubernetesRig):
    condition = None


class WebhookRig(GateRig):
    async def start_other_side(self) -> None:
        self.server = await WebhookServer().start()
        (self.folder / "secret").write_bytes(SECRET + b"\n")

    async def stop_other_side(self) -> None:
        await self.server.stop()

    def section(self, **more: Any) -> WebhookSection:
        return WebhookSection.model_validate(
            {
                "url": f"http://127.0.0.1:{self.server.port}/gate",
                "secret_file": self.folder / "secret",
                "allow": ["127.0.0.0/8"],
                "call_seconds_max": CALL_SECONDS,
                **more,
            }
        )

    def gate(self) -> Gate:
        return WebhookGate(self.section(), "alpha", None)

    async def begin(self) -> asyncio.Task[int]:
        self.server.in_flight = (self.server.in_flight or 0) + 1

        async def end() -> int:
            await self.engine.go.wait()
            self.server.in_flight = 0
            return 200

        task = asyncio.create_task(end())
        self._asked.append(task)
        return task

    async def go_silent(self) -> None:
        await self.server.stop()

    async def come_back(self) -> None:
        await self.server.start()

    async def hang(self) -> None:
        self.server.hangs.clear()

    async def unhang(self) -> None:
        self.server.hangs.set()

    async def open_by_itself(self) -> None:
        self.server.state = "open"


class NoneRig(GateRig):
    may_open_by_itself = False
    can_be_silent = False
    can_abort = False
    in_flight_in_looks = False
    engine_counts = True

    def gate(self) -> Gate:
        return NoGate(Counter(self.engine.url, "vllm", NoneSection()))


RIGS: dict[str, type[GateRig]] = {
    "gateway": GatewayRig,
    "haproxy": HaproxyRig,
    "two haproxies": TwoHaproxiesRig,
    "haproxy and gateway": BackedHaproxyRig,
    "kubernetes": KubernetesRig,
    "kubernetes condition": ConditionRig,
    "kubernetes label": LabelRig,
    "webhook": WebhookRig,
    "none": NoneRig,
}


@asynccontextmanager
async def gate_rig(kind: type[GateRig]) -> AsyncIterator[Any]:
    folder = Path(tempfile.mkdtemp(prefix="lull-"))  # short enough for Unix sockets
    rig = kind(folder)
    try:
        await rig.start()
        yield rig
    finally:
        await rig.stop()
        shutil.rmtree(folder)
