"""The Python client: one synchronous method per thing the API can do.

Errors are a tree: ClientError > ProblemError (the server said no: ``status``, ``code``, ``detail``), ServerUnreachable
(no answer), WaitTimeout (the bound of ``wait`` passed). Long streams resume by themselves where they broke off.
"""

from __future__ import annotations

import json
import ssl
import time
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final, Literal, TypeVar
from urllib.parse import quote

import httpx
from httpx_sse import EventSource, SSEError
from pydantic import BaseModel

from ..agents.protocol.policy import EnginePolicy
from . import schemas

API: Final = "/api/v1"
LOG_OFFSET: Final = "Lull-Log-Offset"
LOG_ATTEMPT: Final = "Lull-Log-Attempt"
GAP_MARK: Final = b"\n[lull: "  # how a gap in the middle of a log is told
STREAM_BREAKS_MAX: Final = 5  # in a row, without a byte between
HEARTBEATS_MISSED_SECONDS: Final = 45.0  # three heartbeats of the event stream
ENDED: Final = frozenset({"succeeded", "failed", "cancelled", "timed_out"})

View = TypeVar("View", bound=BaseModel)
LogStream = Literal["stdout", "stderr"]


class ClientError(Exception):
    """The root of what this client raises."""


class ProblemError(ClientError):
    """The server refused. ``document`` is the whole problem document."""

    def __init__(self, status: int, code: str, detail: str, document: Mapping[str, Any] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.document = dict(document or {})


class ServerUnreachable(ClientError):
    """No answer came from the server."""


class WaitTimeout(ClientError):
    """The job had not ended when the time was over. ``job`` is how it was last seen."""

    def __init__(self, job: schemas.Job, seconds: float) -> None:
        super().__init__(f"job {job.id} is still {job.state} after {seconds:g} s")
        self.job = job


class Client:
    """Speaks to one server. ``transport`` is for tests and special networks."""

    def __init__(
        self,
        base_url: str,
        token: str,
        *,
        timeout_seconds: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        # trust_env off: a proxy meant for the web must not get the token of a server on loopback.
        self._http = httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout_seconds,
            transport=transport,
            trust_env=False,
            # Reading every CA takes longer than most requests and is of no use without TLS.
            verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if self.base_url.startswith("http://") else True,
        )
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    # ---- jobs ----

    def submit(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        name: str | None = None,
        priority: int = 0,
        project: str | None = None,
        gpus: int = 1,
        hbm_bytes: int | None = None,
        time_limit_seconds: float | None = None,
        kill_grace_seconds: float | None = None,
        idempotency_key: str | None = None,
    ) -> schemas.Job:
        """Queues a job. A lost answer is asked for again under the same key, so the job is queued once."""
        fields: dict[str, Any] = {
            "argv": list(argv),
            "env": dict(env) if env else None,
            "workdir": workdir,
            "name": name,
            "priority": priority,
            "project": project,
            "gpus": gpus,
            "hbm_bytes": hbm_bytes,
            "time_limit_seconds": time_limit_seconds,
            "kill_grace_seconds": kill_grace_seconds,
        }
        body = {field: value for field, value in fields.items() if value is not None}
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._read(schemas.Job, "POST", "/jobs", json=body, headers=headers)

    def jobs(
        self,
        *,
        state: str | None = None,
        project: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> schemas.JobPage:
        """One page, newest first; ``next_cursor`` leads to the next."""
        params = _given(state=state, project=project, limit=limit, cursor=cursor)
        return self._read(schemas.JobPage, "GET", "/jobs", params=params)

    def all_jobs(self, *, state: str | None = None, project: str | None = None) -> Iterator[schemas.Job]:
        """Every job, page after page."""
        cursor: str | None = None
        while True:
            page = self.jobs(state=state, project=project, limit=1000, cursor=cursor)
            yield from page.items
            if page.next_cursor is None:
                return
            cursor = page.next_cursor

    def job(self, job_id: str) -> schemas.Job:
        return self._read(schemas.Job, "GET", f"/jobs/{_segment(job_id)}")

    def attempts(self, job_id: str) -> list[schemas.Attempt]:
        return self._read(schemas.AttemptList, "GET", f"/jobs/{_segment(job_id)}/attempts").items

    def cancel(self, job_id: str) -> schemas.Job:
        return self._read(schemas.Job, "POST", f"/jobs/{_segment(job_id)}/cancel")

    def hold(self, job_id: str) -> schemas.Job:
        """A queued job waits until it is released."""
        return self._read(schemas.Job, "POST", f"/jobs/{_segment(job_id)}/hold")

    def release(self, job_id: str) -> schemas.Job:
        return self._read(schemas.Job, "POST", f"/jobs/{_segment(job_id)}/release")

    def retry(self, job_id: str, *, idempotency_key: str | None = None) -> schemas.Job:
        """A new job that asks for what this one asked, which has ended without success; or the one that was made so
        before and has not ended."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return self._read(schemas.Job, "POST", f"/jobs/{_segment(job_id)}/retry", headers=headers)

    def resolve(
        self, attempt_id: str, outcome: Literal["failed", "requeue"], *, confirm: bool = False
    ) -> schemas.Attempt:
        """Ends an attempt of unknown fate; ``requeue`` needs ``confirm``: its job may then run twice at once."""
        body = {"outcome": outcome, "confirm": confirm}
        return self._read(schemas.Attempt, "POST", f"/attempts/{_segment(attempt_id)}/resolve", json=body)

    def wait(self, job_id: str, timeout: float | None = None) -> schemas.Job:
        """The job once it has ended; raises WaitTimeout after ``timeout`` seconds (None: waits for ever)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = 20.0 if deadline is None else max(0.0, min(20.0, deadline - time.monotonic()))
            job = self._wait(schemas.Job, f"/jobs/{_segment(job_id)}", left)
            if job.state in ENDED:
                return job
            if timeout is not None and deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(job, timeout)

    def logs(
        self,
        job_id: str,
        *,
        stream: LogStream = "stdout",
        offset: int = 0,
        follow: bool = False,
        attempt: int | None = None,
    ) -> Iterator[bytes]:
        """The bytes of a stream from ``offset`` on. ``follow`` waits for the job to start and goes on to its end."""
        path = f"{API}/jobs/{_segment(job_id)}/logs"
        goes_on = follow and attempt is None
        after_attempt: int | None = None  # the log up to this attempt is through, and another one may follow
        breaks, has_begun = 0, False
        while True:
            params = _given(
                stream=stream, offset=offset, follow=int(follow), attempt=attempt, after_attempt=after_attempt
            )
            has_gap = False
            try:
                with self._stream(path, params, {}, read_seconds=None if follow else 90.0) as response:
                    has_begun = True
                    offset = int(response.headers.get(LOG_OFFSET, offset))
                    for chunk in response.iter_raw():
                        has_gap = has_gap or GAP_MARK in chunk
                        offset += len(chunk)
                        breaks = 0
                        yield chunk
                if not goes_on or LOG_ATTEMPT not in response.headers:
                    return
                # Preempted jobs run again: the next attempt's log continues this one, if there is one.
                after_attempt, offset = int(response.headers[LOG_ATTEMPT]), 0
            except ProblemError as problem:
                if after_attempt is not None and problem.status == 404:
                    return
                if not (follow and problem.code == "no_attempt_yet"):
                    raise
            except httpx.TransportError as error:
                breaks += 1
                # Beyond a gap our count is not the log's.
                if not has_begun or has_gap or breaks > STREAM_BREAKS_MAX:
                    raise ServerUnreachable(f"{self.base_url}: the log broke off: {error}") from error
                time.sleep(_pause_seconds(breaks))

    # ---- engines ----

    def engines(self) -> list[schemas.Engine]:
        return self._read(schemas.EngineList, "GET", "/engines").items

    def engine(self, engine: str) -> schemas.Engine:
        """By id or name."""
        return self._read(schemas.Engine, "GET", f"/engines/{_segment(engine)}")

    def engine_plan(self, engine: str, hbm_bytes: int, *, gpus: int | None = None) -> schemas.EnginePlan:
        """What a loan would release of it so that each of ``gpus`` devices (all of its own) has so much free."""
        params = _given(hbm_bytes=hbm_bytes, gpus=gpus)
        return self._read(schemas.EnginePlan, "GET", f"/engines/{_segment(engine)}/plan", params=params)

    def policy(self, engine: str) -> schemas.PolicyView:
        return self._read(schemas.PolicyView, "GET", f"/engines/{_segment(engine)}/policy")

    def put_policy(
        self, engine: str, policy: EnginePolicy | Mapping[str, Any], *, expected_version: int | None = None
    ) -> schemas.PolicyView:
        """Replaces the policy; with ``expected_version`` only if nobody has changed it since (else status 412)."""
        body = policy.model_dump(mode="json") if isinstance(policy, EnginePolicy) else dict(policy)
        headers = {} if expected_version is None else {"If-Match": f'"{expected_version}"'}
        path = f"/engines/{_segment(engine)}/policy"
        return self._read(schemas.PolicyView, "PUT", path, json=body, headers=headers)

    def restart_engine(self, engine: str) -> schemas.Engine:
        """Orders a supervised engine to be restarted."""
        return self._read(schemas.Engine, "POST", f"/engines/{_segment(engine)}/restart")

    # ---- nodes, loans, history ----

    def park_engine(
        self,
        engine: str,
        *,
        for_seconds: float | None = None,
        wake_on_request: bool = True,
        idempotency_key: str | None = None,
    ) -> schemas.Operation:
        """Parks an engine without a job: until its time is over, it is resumed, or a request wakes it."""
        body = _given(for_seconds=for_seconds, wake_on_request=wake_on_request)
        return self._post_operation(engine, "park", idempotency_key, json=body)

    def resume_engine(self, engine: str, *, idempotency_key: str | None = None) -> schemas.Operation:
        """Wakes an engine that is parked without a job."""
        return self._post_operation(engine, "resume", idempotency_key)

    def _post_operation(self, engine: str, verb: str, key: str | None, **body: Any) -> schemas.Operation:
        headers = {"Idempotency-Key": key or uuid.uuid4().hex}
        return self._read(schemas.Operation, "POST", f"/engines/{_segment(engine)}/{verb}", headers=headers, **body)

    def operation(self, operation_id: str, *, wait_seconds: float = 0.0) -> schemas.Operation:
        """How far it is; with ``wait_seconds`` as soon as it is over, at the latest after so many seconds."""
        return self._wait(schemas.Operation, f"/operations/{_segment(operation_id)}", wait_seconds)

    def nodes(self) -> list[schemas.Node]:
        return self._read(schemas.NodeList, "GET", "/nodes").items

    def node(self, node: str) -> schemas.Node:
        """By id or name."""
        return self._read(schemas.Node, "GET", f"/nodes/{_segment(node)}")

    def loans(
        self, *, open_only: bool = False, limit: int | None = None, cursor: str | None = None
    ) -> schemas.LoanPage:
        params = _given(open=1 if open_only else None, limit=limit, cursor=cursor)
        return self._read(schemas.LoanPage, "GET", "/loans", params=params)

    def loan(self, loan_id: str) -> schemas.Loan:
        """With its steps."""
        return self._read(schemas.Loan, "GET", f"/loans/{_segment(loan_id)}")

    def recall_loan(self, loan_id: str) -> schemas.Loan:
        """Orders a loan to be ended early; its jobs are preempted and queued again."""
        return self._read(schemas.Loan, "POST", f"/loans/{_segment(loan_id)}/recall")

    def give_up_loan(self, loan_id: str) -> schemas.Loan:
        """Orders a faulted loan to be closed as it is; the gates of its engines stay closed."""
        return self._read(schemas.Loan, "POST", f"/loans/{_segment(loan_id)}/give-up")

    def usage(
        self,
        *,
        since: datetime | str | None = None,
        until: datetime | str | None = None,
        device: str | None = None,
    ) -> schemas.UsageList:
        params = _given(since=_time_text(since), until=_time_text(until), device=device)
        return self._read(schemas.UsageList, "GET", "/usage", params=params)

    def events_page(self, *, since: int = 0, types: Sequence[str] = (), limit: int | None = None) -> schemas.EventPage:
        """Events after ``since``, without waiting for more."""
        params = _given(since=since, follow=0, type=list(types) or None, limit=limit)
        return self._read(schemas.EventPage, "GET", "/events", params=params)

    def events(self, *, since: int = 0, types: Sequence[str] = ()) -> Iterator[schemas.Event]:
        """Events after ``since`` and then each as it happens, for ever; reconnects from the last one seen."""
        breaks, has_begun = 0, False
        while True:
            params = _given(type=list(types) or None)
            headers = {"Accept": "text/event-stream", "Last-Event-ID": str(since)}
            try:
                with self._stream(f"{API}/events", params, headers, HEARTBEATS_MISSED_SECONDS) as response:
                    has_begun = True
                    for message in EventSource(response).iter_sse():
                        if not message.data:  # a heartbeat, which httpx-sse hands out once it has seen an id
                            continue
                        event = schemas.Event.model_validate_json(message.data)
                        since = event.seq
                        breaks = 0
                        yield event
                breaks += 1  # a server that stops ends its streams
            except (httpx.TransportError, SSEError) as error:
                breaks += 1
                if not has_begun:
                    raise ServerUnreachable(f"{self.base_url}: {error}") from error
            if breaks > STREAM_BREAKS_MAX:
                raise ServerUnreachable(f"{self.base_url}: the event stream broke off {breaks} times in a row")
            time.sleep(_pause_seconds(breaks))

    def version(self) -> schemas.Version:
        return self._read(schemas.Version, "GET", "/version")

    # ---- the wire ----

    def _read(self, view: type[View], method: str, path: str, **arguments: Any) -> View:
        try:
            try:
                response = self._http.request(method, API + path, **arguments)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # A kept connection that the server closed meanwhile. All requests here may be sent twice.
                response = self._http.request(method, API + path, **arguments)
        except httpx.TransportError as error:
            raise ServerUnreachable(f"{self.base_url}: {error}") from error
        _raise_for_problem(response)
        return view.model_validate_json(response.content)

    def _wait(self, view: type[View], path: str, wait_seconds: float) -> View:
        """Asks for an answer that may take ``wait_seconds`` longer than any other."""
        timeout = httpx.Timeout(self._timeout_seconds, read=self._timeout_seconds + wait_seconds)
        params = _given(wait_seconds=round(wait_seconds, 3) or None)
        return self._read(view, "GET", path, params=params, timeout=timeout)

    @contextmanager
    def _stream(
        self, path: str, params: Mapping[str, Any], headers: Mapping[str, str], read_seconds: float | None
    ) -> Generator[httpx.Response]:
        timeout = httpx.Timeout(self._timeout_seconds, read=read_seconds)
        request = self._http.build_request("GET", path, params=params, headers=headers, timeout=timeout)
        response = self._http.send(request, stream=True)
        try:
            if response.is_error:
                response.read()
                _raise_for_problem(response)
            yield response
        finally:
            response.close()


def _raise_for_problem(response: httpx.Response) -> None:
    if response.is_success:
        return
    document: dict[str, Any] = {}
    try:
        document = json.loads(response.content)
        code, detail = str(document["code"]), str(document["detail"])
    except (ValueError, KeyError, TypeError, RecursionError):
        document, code = {}, "not_lull"
        detail = f"status {response.status_code} without a problem document: is {response.url} a Lull server?"
    raise ProblemError(response.status_code, code, detail, document)


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _segment(name: str) -> str:
    """``name`` as one path segment, so that it cannot lead elsewhere."""
    if name in ("", ".", ".."):
        raise ClientError(f"{name!r} is no id or name")
    return quote(name, safe="")


def _time_text(value: datetime | str | None) -> str | None:
    return value.isoformat() if isinstance(value, datetime) else value


def _pause_seconds(breaks: int) -> float:
    return float(min(5.0, 0.1 * 2**breaks))
