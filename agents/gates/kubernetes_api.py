"""The few calls of the Kubernetes API that a gate needs: one pod, its status and labels, and who lists it as ready."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from ..errors import ConfigError
from ..key_files import KeyUnusable, read_header_key
from .base import GateRefused, GateUnreachable
from .bounded_http import Reply, Tls, exchange
from .sections import KubernetesSection

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
STRATEGIC_MERGE: Final = "application/strategic-merge-patch+json"
MERGE: Final = "application/merge-patch+json"
_ANSWER_BYTES_MAX: Final = 8 << 20
_PAGE: Final = "200"
_PAGES_MAX: Final = 50
_CONFLICT: Final = 409


class Conflict(GateUnreachable):
    """Somebody else changed the object since it was read: read it again."""


@dataclass(frozen=True, slots=True)
class Pod:
    name: str
    uid: str
    resource_version: str
    labels: Mapping[str, str]
    readiness_gates: frozenset[str]
    conditions: Mapping[str, str]  # status by type


class KubernetesApi:
    """Raises GateUnreachable without an answer, GateRefused for 4xx; tokens are read again at every call."""

    def __init__(self, section: KubernetesSection) -> None:
        in_cluster = section.api_url is None
        self._url = (section.api_url or _in_cluster_url()).rstrip("/")
        account = SERVICE_ACCOUNT if in_cluster else None
        self._token_file = section.token_file or (account / "token" if account else None)
        self._tls = Tls(
            section.ca_file or (account / "ca.crt" if account else None),
            section.client_certificate_file,
            section.client_key_file,
        )
        self._namespace = section.namespace or _in_cluster_namespace()
        self._seconds_max = section.call_seconds_max

    @property
    def _core(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}/pods"

    async def pod(self, name: str) -> Pod:
        return _pod(await self._call("GET", f"{self._core}/{name}"))

    async def pods(self, selector: str, node: str | None) -> list[Pod]:
        """Those that are not being deleted; a handful suffices to tell that there is not exactly one."""
        params = {"labelSelector": selector, "limit": _PAGE}
        if node is not None:
            params["fieldSelector"] = f"spec.nodeName={node}"
        items = _items(await self._call("GET", self._core, params))
        return [_pod(item) for item in items if not _object(item.get("metadata")).get("deletionTimestamp")]

    async def patch_condition(self, pod: Pod, condition: Mapping[str, str]) -> Pod:
        """Raises Conflict if the pod was changed since ``pod`` was read."""
        body = {"metadata": {"resourceVersion": pod.resource_version}, "status": {"conditions": [dict(condition)]}}
        return _pod(await self._patch(f"{self._core}/{pod.name}/status", STRATEGIC_MERGE, body))

    async def patch_label(self, pod: Pod, label: str, value: str | None) -> Pod:
        """None takes the label away. Raises Conflict as ``patch_condition``."""
        body = {"metadata": {"resourceVersion": pod.resource_version, "labels": {label: value}}}
        return _pod(await self._patch(f"{self._core}/{pod.name}", MERGE, body))

    async def lists_as_ready(self, service: str, pod: Pod) -> bool:
        """Whether any EndpointSlice of the service has the pod as ready. A condition that is not said means yes."""
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
        params = {"labelSelector": f"kubernetes.io/service-name={service}", "limit": _PAGE}
        for _ in range(_PAGES_MAX):
            page = await self._call("GET", path, params)
            for item in _items(page):
                if any(_is_ready(endpoint, pod) for endpoint in _objects(item.get("endpoints"))):
                    return True
            more = _object(page.get("metadata")).get("continue")
            if not more:
                return False
            params["continue"] = str(more)
        raise GateUnreachable(f"service {service} has more than {_PAGES_MAX} pages of EndpointSlices")

    # ---- calls ------------------------------------------------------------------------------------------------

    async def _patch(self, path: str, content_type: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._call("PATCH", path, None, json.dumps(body).encode(), content_type)

    async def _call(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: bytes | None = None,
        content_type: str | None = None,
    ) -> dict[str, Any]:
        headers = {"accept": "application/json", **self._authorization()}
        if content_type is not None:
            headers["content-type"] = content_type
        reply = await exchange(
            method,
            self._url + path,
            self._seconds_max,
            _ANSWER_BYTES_MAX,
            self._tls,
            params=params,
            headers=headers,
            body=body,
        )
        return _accepted(reply, f"{method} {self._url}{path}")

    def _authorization(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"authorization": f"Bearer {read_header_key(self._token_file)}"}
        except KeyUnusable as error:
            raise GateRefused(f"the token {self._token_file} {error}") from error


def _accepted(reply: Reply, asked: str) -> dict[str, Any]:
    if reply.status == _CONFLICT:
        raise Conflict(reply.words())
    if reply.status == 200:
        answer = reply.json_object()
        if answer is None:
            raise GateUnreachable(f"{asked}: no JSON object")
        return answer
    text = f"{asked}: HTTP {reply.status}: {reply.words()}"
    if 400 <= reply.status < 500 and reply.status != 429:
        raise GateRefused(text)
    raise GateUnreachable(text)


def _in_cluster_url() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port:
        raise ConfigError("kubernetes.api_url: missing; it can be left out only in a pod, which tells its API server")
    return f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"


def _in_cluster_namespace() -> str:
    try:
        return (SERVICE_ACCOUNT / "namespace").read_text().strip()
    except OSError as error:
        raise ConfigError(f"kubernetes.namespace: missing, and not told by the pod: {error}") from error


def _object(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _objects(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        return []
    return [cast("dict[str, Any]", entry) for entry in cast("list[object]", value) if isinstance(entry, dict)]


def _items(answer: Mapping[str, Any]) -> list[dict[str, Any]]:
    if not isinstance(answer.get("items"), list):
        raise GateUnreachable("the answer is no list of objects")
    return _objects(answer["items"])


def _pod(document: Mapping[str, Any]) -> Pod:
    about, status = _object(document.get("metadata")), _object(document.get("status"))
    names = [about.get(key) for key in ("name", "uid", "resourceVersion")]
    if not all(isinstance(name, str) and name for name in names):
        raise GateUnreachable("the answer is no pod")
    return Pod(
        name=str(about["name"]),
        uid=str(about["uid"]),
        resource_version=str(about["resourceVersion"]),
        labels={key: str(value) for key, value in _object(about.get("labels")).items()},
        readiness_gates=frozenset(
            str(gate.get("conditionType")) for gate in _objects(_object(document.get("spec")).get("readinessGates"))
        ),
        conditions={str(one.get("type")): str(one.get("status")) for one in _objects(status.get("conditions"))},
    )


def _is_ready(endpoint: Mapping[str, Any], pod: Pod) -> bool:
    target = _object(endpoint.get("targetRef"))
    is_it = target.get("kind") == "Pod" and target.get("name") == pod.name and target.get("uid", pod.uid) == pod.uid
    return is_it and _object(endpoint.get("conditions")).get("ready") is not False
