"""The demo's one loan from beginning to end, and the facts that are gathered on the way."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import httpx

from ..bench.box import Box, BoxError, EnginePlan, device_uuids
from ..bench.loan_parts import is_over
from ..vmm.reference_engine.witness import read_witness
from .demo_load import Record, read_records
from .demo_watch import Sample, Watcher

if TYPE_CHECKING:
    from ..api.client import Client
    from ..api.schemas import Job, Loan
    from ..bench.vllm_engine import VllmInstall

MIB: Final = 1 << 20
ALIGN_BYTES: Final = 2 * MIB
KV_CACHE_BYTES_MAX: Final = 64 * MIB
OTHER_BYTES: Final = 16 * MIB  # weights of the engine beside a vLLM
ENGINE_NAMES: Final = ("alpha", "beta")
WARM_ANSWERS: Final = 3  # of every engine, before the job is submitted
ASKED: Final = {"prompt": "Lull lends", "max_tokens": 8, "temperature": 0, "logprobs": 1}
ASK_SECONDS_MAX: Final = 120.0


def plan_engines(weights_bytes: int) -> list[EnginePlan]:
    """Two equal engines, each alone on a device that has a quarter of the weights' size left."""
    kv_cache_bytes = _aligned(min(KV_CACHE_BYTES_MAX, weights_bytes // 2))
    free_bytes = _aligned(max(8 * MIB, weights_bytes // 4))
    return [EnginePlan(name, weights_bytes, kv_cache_bytes, free_bytes) for name in ENGINE_NAMES]


def plan_vllm(vllm: VllmInstall, weights_bytes: int) -> list[EnginePlan]:
    """A vLLM that is lent, and a small reference engine that serves all the time."""
    first, other = plan_engines(weights_bytes)
    beside = EnginePlan(other.name, OTHER_BYTES, OTHER_BYTES // 2, OTHER_BYTES // 2, lends=False)
    return [replace(first, vllm=vllm), beside]


def job_need_bytes(free_bytes: int, weights_bytes: int) -> int:
    """More than is free by five eighths of the weights: 640 MiB more beside an engine of 1 GiB."""
    return _aligned(free_bytes + weights_bytes * 5 // 8)


def _aligned(nbytes: int) -> int:
    return max(1, nbytes // ALIGN_BYTES) * ALIGN_BYTES


class Teller(Protocol):
    """Who shows what happens."""

    def say(self, sentence: str) -> None: ...
    def show(self, loan: Loan | None, sample: Sample, devices: Mapping[str, str], records: list[Record]) -> None: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """What every engine answers and where its memory lies."""

    answers: dict[str, Any]
    addresses: dict[str, Any]


@dataclass(slots=True)
class Facts:
    """All that was seen. The report is made of nothing else."""

    plan: list[EnginePlan]
    devices: dict[str, str] = field(default_factory=dict[str, str])  # engine -> uuid of its device
    lent: str = ""  # the engine that was lent
    need_bytes: int = 0
    before: Asked | None = None
    after: Asked | None = None
    sample_before: Sample | None = None
    sample_after: Sample | None = None
    samples: list[Sample] = field(default_factory=list[Sample])
    job: Job | None = None
    job_output: str = ""
    loan: Loan | None = None
    records: list[Record] = field(default_factory=list[Record])
    asked_count: int = 0  # own questions to each engine through the gateway
    witness: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])

    @property
    def device_uuid(self) -> str:
        """Of the device that was lent."""
        return self.devices[self.lent]

    @property
    def other(self) -> str:
        """The engine that was not lent."""
        return next(name for name in self.devices if name != self.lent)


class Story:
    def __init__(self, box: Box, teller: Teller, seconds: float) -> None:
        self.box = box
        self.teller = teller
        self.facts = Facts(plan=list(box.engines))
        self._deadline = time.monotonic() + seconds
        self._load_out = box.directory / "load.jsonl"

    def run(self) -> Facts:
        """Raises BoxError when it cannot go on; what merely turned out wrong is in the facts."""
        with self._client() as client, Watcher(self.box.processes) as watcher:
            load = self._start_load()
            self._ask_before(watcher)
            self._lend(client, watcher)
            self._until_served_again()
            self._end_load(load)
            self._ask_after(watcher)
            begun = self.facts.sample_before.at if self.facts.sample_before else 0.0
            self.facts.samples = [sample for sample in watcher.samples if sample.at >= begun]
            if watcher.failed is not None:
                raise BoxError(f"the watcher of /proc failed: {watcher.failed!r}")
        self.facts.records = read_records(self._load_out)
        self.facts.witness = {name: asdict(read_witness(self.box.witness_path(name))) for name in self._ours()}
        return self.facts

    def _ours(self) -> list[str]:
        """Those that tell what reached them and where their memory lies."""
        return [plan.name for plan in self.facts.plan if plan.vllm is None]

    def _left(self) -> float:
        return max(0.1, self._deadline - time.monotonic())

    def _wait(self, look: Callable[[], object], what: str, last_seen: Callable[[], str] = lambda: "") -> None:
        self.box.wait_for(look, self._left(), what, last_seen)

    def _client(self) -> Client:
        self.teller.say("starting server, agent, gateway and two engines")
        self.box.wait_ready(self._left(), self.teller.say)
        self.facts.devices = device_uuids(self.box)
        return self.box.client()

    def _start_load(self) -> subprocess.Popen[bytes]:
        self.teller.say("a process of its own sends both engines a steady stream of requests, and never retries one")
        load = self.box.spawn(
            [
                *(sys.executable, "-P", "-m", "lull.cli.demo_load", "--port", str(self.box.gateway_port)),
                *(word for name in ENGINE_NAMES for word in ("--model", name)),
                *("--out", str(self._load_out)),
            ]
        )
        self._wait(
            lambda: all(self._answers_since(name, 0.0) >= WARM_ANSWERS for name in ENGINE_NAMES),
            "answers of both engines",
            lambda: f"{len(read_records(self._load_out))} requests sent",
        )
        return load

    def _end_load(self, load: subprocess.Popen[bytes]) -> None:
        """No new requests; those that are on their way get their answers."""
        load.terminate()
        try:
            load.wait(self._left())
        except subprocess.TimeoutExpired:
            raise BoxError("the load's last requests were not answered in time") from None

    def _answers_since(self, name: str, since: float) -> int:
        records = read_records(self._load_out)
        return sum(1 for record in records if record.model == name and record.sent >= since and record.answered)

    def _ask(self) -> Asked:
        answers: dict[str, Any] = {}
        addresses: dict[str, Any] = {}
        self.facts.asked_count += 1
        with httpx.Client(timeout=ASK_SECONDS_MAX, trust_env=False) as http:
            for name in ENGINE_NAMES:
                answer = http.post(f"{self.box.gateway_url}/v1/completions", json={"model": name, **ASKED})
                answer.raise_for_status()
                answers[name] = answer.json()["choices"]
                if name not in self._ours():
                    # It answers several requests at once, and the last bits of a sum depend on which.
                    answers[name] = [choice["text"] for choice in answers[name]]
                    continue
                places = http.get(f"{self.box.engine_url(name)}/lull/addresses")
                places.raise_for_status()
                addresses[name] = places.json()
        return Asked(answers, addresses)

    def _ask_before(self, watcher: Watcher) -> None:
        facts = self.facts
        facts.before = self._ask()
        facts.sample_before = watcher.now()

    def _ask_after(self, watcher: Watcher) -> None:
        try:
            self.facts.after = self._ask()
        except (httpx.HTTPError, ValueError, KeyError) as error:
            self.teller.say(f"the engines do not answer as before: {error}")
        self.facts.sample_after = watcher.now()

    def _lend(self, client: Client, watcher: Watcher) -> None:
        facts = self.facts
        assert facts.sample_before is not None
        lent = [plan for plan in facts.plan if plan.lends]
        free = min(plan.capacity_bytes - facts.sample_before.used_bytes(facts.devices[plan.name]) for plan in lent)
        facts.need_bytes = job_need_bytes(free, facts.plan[0].weights_bytes)
        self.teller.say(
            f"{free // MIB} MiB are free on each device; submitting a job that needs {facts.need_bytes // MIB} MiB"
        )
        argv = [sys.executable, "-P", "-m", "lull.cli.demo_job", "--bytes", str(facts.need_bytes)]
        submitted = client.submit(argv, name="demo", hbm_bytes=facts.need_bytes)
        self._watch_loan(client, submitted.id, watcher)
        facts.job_output = b"".join(client.logs(submitted.id)).decode(errors="replace")
        loan = facts.loan
        if loan is None or not loan.engine_ids:
            raise BoxError(f"the job ran without a loan of an engine: {facts.job}")
        facts.lent = client.engine(loan.engine_ids[0]).name

    def _watch_loan(self, client: Client, job_id: str, watcher: Watcher) -> None:
        facts = self.facts
        loan_id: str | None = None

        def over() -> bool:
            nonlocal loan_id
            job = facts.job = client.job(job_id)
            loan_id = job.loan_id or next((a.loan_id for a in job.attempts if a.loan_id), None) or loan_id
            if loan_id is not None:
                facts.loan = client.loan(loan_id)
            sample = watcher.samples[-1] if watcher.samples else watcher.now()
            self.teller.show(facts.loan, sample, facts.devices, read_records(self._load_out))
            ended = job.state in ("succeeded", "failed", "cancelled", "timed_out")
            loan = facts.loan
            return ended and loan is not None and is_over(loan.state, (step.step for step in loan.steps))

        self._wait(over, "the end of the job and of its loan", lambda: self._loan_words(client))

    def _loan_words(self, client: Client) -> str:
        job, loan = self.facts.job, self.facts.loan
        reasons = "; ".join(reason.sentence for reason in job.reasons) if job else ""
        steps = loan.steps[-1].step if loan and loan.steps else "none"
        why = f", {loan.reason.sentence}" if loan and loan.reason else ""
        return (
            f"job {job.state if job else 'unknown'} ({reasons or 'no reason given'}),"
            f" loan {loan.state if loan else 'not opened'}, last step {steps}{why}; {client.base_url}"
        )

    def _until_served_again(self) -> None:
        """Until the engine that was lent has answered a request that was sent after its gate opened."""
        since = time.monotonic()
        self._wait(lambda: self._answers_since(self.facts.lent, since) >= 1, f"an answer of {self.facts.lent}")
