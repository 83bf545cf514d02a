"""What can go wrong between the scheduler and its callers, one class per different handling.

SchedulerError
├── NotFound                 no such job, engine, node, loan
├── Conflict                 the present state does not allow it (``state``)
│   ├── PolicyLocked         the agent's TOML rules
│   ├── VersionConflict      If-Match did not match (``current_version``)
│   ├── StaleIncarnation     a newer registration of the node rules: register again
│   └── DuplicateIdentity    another agent has this node's id (``retry_after_seconds``)
├── InvalidRequest           a value cannot be used (``field``)
│   ├── PolicyNotHonoured    the engine cannot be parked by its policy
│   ├── IdempotencyMismatch  the same key with another body
│   └── Unsatisfiable        no known node could ever run it (``largest_bytes``)
├── QueueFull                too many jobs wait
├── NotLeader                another scheduler leads, nothing was written
├── SchemaTooNew             the database was migrated by a newer version
└── DatabaseUnavailable      nothing was promised; try again later
    ├── StorageFull
    └── WriterBusy           more requests wait for the writer than it may hold
"""

from __future__ import annotations


class SchedulerError(Exception):
    """The root. Its text is fit for people."""


class NotFound(SchedulerError):
    def __init__(self, noun: str, key: str) -> None:
        super().__init__(f"there is no {noun} {key!r}")
        self.noun = noun
        self.key = key


class Conflict(SchedulerError):
    def __init__(self, text: str, *, state: str | None = None) -> None:
        super().__init__(text)
        self.state = state


class PolicyLocked(Conflict):
    def __init__(self, engine_id: str) -> None:
        super().__init__(f"the policy of engine {engine_id} is locked by its agent's configuration file; edit it there")
        self.engine_id = engine_id


class VersionConflict(Conflict):
    def __init__(self, expected_version: int, current_version: int) -> None:
        super().__init__(f"the policy is at version {current_version}, not {expected_version}; read it again")
        self.expected_version = expected_version
        self.current_version = current_version


class StaleIncarnation(Conflict):
    def __init__(self, node_id: str, detail: str, current: int) -> None:
        super().__init__(f"node {node_id}: {detail}; register again")
        self.node_id = node_id
        self.current = current


class DuplicateIdentity(Conflict):
    """``retry_after_seconds`` is None where waiting cannot help."""

    def __init__(self, node_id: str, detail: str, *, retry_after_seconds: int | None = None) -> None:
        super().__init__(f"node {node_id}: {detail}")
        self.node_id = node_id
        self.retry_after_seconds = retry_after_seconds


class InvalidRequest(SchedulerError):
    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}")
        self.field = field


class PolicyNotHonoured(InvalidRequest):
    def __init__(self, text: str) -> None:
        super().__init__("policy", text)


class IdempotencyMismatch(InvalidRequest):
    def __init__(self, key: str) -> None:
        super().__init__("Idempotency-Key", f"{key!r} was used with another body; use a new key")


class Unsatisfiable(InvalidRequest):
    """``largest_bytes`` is the most that one of ``gpus`` devices of one node can give; 0 if no node has so many."""

    def __init__(self, field: str, text: str, *, largest_bytes: int, largest_gpus: int) -> None:
        super().__init__(field, text)
        self.largest_bytes = largest_bytes
        self.largest_gpus = largest_gpus


class QueueFull(SchedulerError):
    def __init__(self, jobs_max: int) -> None:
        super().__init__(f"{jobs_max} jobs are waiting already; try again later")
        self.jobs_max = jobs_max


class NotLeader(SchedulerError):
    def __init__(self, term: int) -> None:
        super().__init__(f"term {term} is over: another scheduler leads")
        self.term = term


class SchemaTooNew(SchedulerError):
    def __init__(self, found: str, known: str) -> None:
        super().__init__(
            f"the database is at schema {found}, this version knows {known}:"
            " it was migrated by a newer Lull; run that one"
        )
        self.found = found
        self.known = known


class DatabaseUnavailable(SchedulerError):
    """Nothing was promised. ``retry_after_seconds`` is for the caller's Retry-After."""

    retry_after_seconds: int = 5


class StorageFull(DatabaseUnavailable):
    pass


class WriterBusy(DatabaseUnavailable):
    retry_after_seconds = 1
