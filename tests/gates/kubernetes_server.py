"""Stands in for a Kubernetes API server, as far as a gate speaks to one, with the controllers that follow a pod.

It refuses what the real one refuses, and writes down what it takes without need. Where its behaviour is from:
- Kubernetes API Concepts (kubernetes.io/docs/reference/using-api/api-concepts, v1.34): PATCH content types, 415 for
  others; 409 "Operation cannot be fulfilled on ..." for a resourceVersion that is not the newest; `limit`/`continue`.
- Update API Objects in Place Using kubectl patch (v1.34): a strategic merge joins `conditions` by `type`; a JSON merge
  patch takes a key away by null (RFC 7386).
- Pod Lifecycle, "Pod readiness" (v1.34): a condition of readinessGates that is missing counts as False; a pod is ready
  when its containers are and all of these are True; kubectl patch does not set status, /status does.
- EndpointSlices (v1.34): label kubernetes.io/service-name; targetRef; conditions.ready, null to be read as true.
- API Conventions (sig-architecture): kind Status with message, reason, code for failures.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

TOKEN = "token-of-the-agent"
NAMESPACE = "serving"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@dataclass
class FakePod:
    name: str
    uid: str
    labels: dict[str, str]
    readiness_gates: list[str]
    node: str = "node-a"
    conditions: dict[str, str] = field(default_factory=dict)
    version: int = 1
    containers_ready: bool = True
    deleted: bool = False

    @property
    def ready(self) -> bool:
        return self.containers_ready and all(self.conditions.get(gate) == "True" for gate in self.readiness_gates)

    def document(self) -> dict[str, Any]:
        about: dict[str, Any] = {
            "name": self.name,
            "namespace": NAMESPACE,
            "uid": self.uid,
            "resourceVersion": str(self.version),
            "labels": self.labels,
        }
        if self.deleted:
            about["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        conditions = {**self.conditions, "Ready": "True" if self.ready else "False"}
        return {
            "kind": "Pod",
            "apiVersion": "v1",
            "metadata": about,
            "spec": {
                "nodeName": self.node,
                "readinessGates": [{"conditionType": gate} for gate in self.readiness_gates],
            },
            "status": {"conditions": [{"type": key, "status": value} for key, value in conditions.items()]},
        }


class KubernetesServer:
    """``services``: what each selects by. ``lag_seconds``: what kubelet and the slices' controller take together."""

    def __init__(self, services: dict[str, dict[str, str]], lag_seconds: float = 0.02) -> None:
        self.pods: dict[str, FakePod] = {}
        self.services = services
        self.lag_seconds = lag_seconds
        self.calls: list[tuple[str, str]] = []
        self.odd: list[str] = []  # what a real server would take, and a careful client does not send
        self.status: int | None = None  # every call is answered with it
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.conflicts = 0  # so many patches find that somebody was first
        self.token = TOKEN
        self.port = 0
        self.page_items = 1000
        self.later_pages = 0
        self.on_patch: list[dict[str, Any]] = []
        self._slices: dict[str, list[dict[str, Any]]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> KubernetesServer:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        self.follow()
        return self

    async def stop(self) -> None:
        self.hangs.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def add(self, pod: FakePod) -> FakePod:
        self.pods[pod.name] = pod
        self.follow()
        return pod

    def changed(self, pod: FakePod) -> None:
        """Somebody, say kubelet or an operator, changed it."""
        pod.version += 1
        asyncio.get_running_loop().call_later(self.lag_seconds, self.follow)

    def follow(self) -> None:
        """The slices as the pods are now."""
        for service, selector in self.services.items():
            self._slices[service] = [
                {
                    "addresses": ["10.0.0.1"],
                    # A condition that is true may also be left out.
                    "conditions": {} if pod.ready else {"ready": False, "serving": False},
                    "targetRef": {"kind": "Pod", "namespace": NAMESPACE, "name": pod.name, "uid": pod.uid},
                }
                for pod in self.pods.values()
                if selector.items() <= pod.labels.items()
            ]

    # ---- HTTP -------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.calls.append((request.method, request.path))
        await self.hangs.wait()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized", "Unauthorized")
        if self.status is not None:
            return _status(self.status, "InternalError", "etcdserver: request timed out")
        body = await request.read()
        if request.method == "GET":
            if body:
                self.odd.append(f"GET {request.path} with a body")
            return self._get(request)
        if request.method == "PATCH":
            return self._patch(request, body)
        return _status(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")

    def _get(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        if request.path.startswith(_PODS + "/"):
            pod = self.pods.get(request.path.removeprefix(_PODS + "/"))
            return _not_found(request.path) if pod is None else web.json_response(pod.document())
        if request.path == _PODS:
            wanted = _selector(query.pop("labelSelector", ""))
            node = query.pop("fieldSelector", "").removeprefix("spec.nodeName=")
            found = [
                pod.document()
                for pod in self.pods.values()
                if wanted.items() <= pod.labels.items() and node in ("", pod.node)
            ]
            return self._page("PodList", found, query)
        if request.path == _SLICES:
            service = _selector(query.pop("labelSelector", "")).get("kubernetes.io/service-name", "")
            endpoints = self._slices.get(service, [])
            # More than one slice, as for a service with many endpoints or two address families.
            slices: list[dict[str, Any]] = [
                {"metadata": {"name": f"{service}-{n}"}, "endpoints": [one]} for n, one in enumerate(endpoints)
            ]
            if not slices:
                slices.append({"metadata": {"name": f"{service}-0"}, "endpoints": None})
            return self._page("EndpointSliceList", slices, query)
        return _not_found(request.path)

    def _page(self, kind: str, items: list[dict[str, Any]], query: dict[str, str]) -> web.Response:
        start = int(query.pop("continue", "0"))
        self.later_pages += start > 0
        size = min(int(query.pop("limit", "1000")), self.page_items)
        if query:
            self.odd.append(f"unknown parameters {query}")
        page = items[start : start + size]
        about = {"continue": str(start + size)} if start + size < len(items) else {}
        return web.json_response({"kind": kind, "metadata": about, "items": page})

    def _patch(self, request: web.Request, raw: bytes) -> web.Response:
        path = request.path.removeprefix(_PODS + "/")
        is_status = path.endswith("/status")
        pod = self.pods.get(path.removesuffix("/status")) if request.path.startswith(_PODS + "/") else None
        if pod is None:
            return _not_found(request.path)
        kind = request.headers.get("Content-Type", "")
        if kind not in ("application/strategic-merge-patch+json", "application/merge-patch+json"):
            return _status(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        try:
            patch: dict[str, Any] = json.loads(raw)
        except ValueError:
            return _status(400, "BadRequest", "invalid character in the patch")
        self.on_patch.append(patch)
        if self.conflicts > 0:
            self.conflicts -= 1
            self.changed(pod)
        version = patch.get("metadata", {}).get("resourceVersion")
        if version is None:
            self.odd.append("a patch without resourceVersion overwrites what somebody else said")
        elif version != str(pod.version):
            words = "the object has been modified; please apply your changes to the latest version and try again"
            return _status(409, "Conflict", f'Operation cannot be fulfilled on pods "{pod.name}": {words}')
        return self._patch_status(pod, patch, kind) if is_status else self._patch_pod(pod, patch, kind)

    def _patch_status(self, pod: FakePod, patch: dict[str, Any], kind: str) -> web.Response:
        if kind != "application/strategic-merge-patch+json":
            self.odd.append("a JSON merge patch replaces all conditions")
            pod.conditions.clear()
        if patch.keys() - {"metadata", "status"} or "labels" in patch.get("metadata", {}):
            self.odd.append(f"/status ignores what is not status: {sorted(patch)}")
        for condition in patch.get("status", {}).get("conditions", []):
            said, when = condition.get("status"), condition.get("lastTransitionTime", "")
            if not condition.get("type") or said not in ("True", "False", "Unknown") or not _TIME.fullmatch(when):
                return _status(422, "Invalid", f'Pod "{pod.name}" is invalid: status.conditions')
            pod.conditions[condition["type"]] = said
        self.changed(pod)
        return web.json_response(pod.document())

    def _patch_pod(self, pod: FakePod, patch: dict[str, Any], kind: str) -> web.Response:
        if patch.keys() != {"metadata"} or patch["metadata"].keys() - {"labels", "resourceVersion"}:
            self.odd.append(f"a patch of more than labels: {patch}")
        for label, value in patch["metadata"].get("labels", {}).items():
            if value is None:
                pod.labels.pop(label, None)
            else:
                pod.labels[label] = value
        self.changed(pod)
        return web.json_response(pod.document())


def _selector(text: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in text.split(",") if part)


def _not_found(path: str) -> web.Response:
    return _status(404, "NotFound", f'pods "{path.rsplit("/", 1)[-1]}" not found')


def _status(code: int, reason: str, message: str) -> web.Response:
    failure = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(failure, status=code)
