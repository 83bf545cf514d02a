from __future__ import annotations

from collections.abc import Iterator

import pytest

from lull.api.app import problem_of
from lull.scheduler import errors


@pytest.mark.parametrize(
    ("error", "status", "code", "extra"),
    [
        (errors.NotFound("job", "x"), 404, "not_found", {}),
        (errors.Conflict("no", state="failed"), 409, "job_ended", {"state": "failed"}),
        (errors.Conflict("no", state="queued"), 409, "conflict", {"state": "queued"}),
        (errors.PolicyLocked("e"), 409, "policy_locked", {}),
        (errors.VersionConflict(1, 3), 412, "version_mismatch", {"current_version": 3}),
        (errors.StaleIncarnation("n", "old", 4), 409, "stale_agent", {"current_incarnation": 4}),
        (errors.DuplicateIdentity("n", "is another"), 409, "duplicate_identity", {}),
        (errors.InvalidRequest("cursor", "is foreign"), 422, "invalid_request", {}),
        (errors.IdempotencyMismatch("k"), 422, "idempotency_mismatch", {}),
        (errors.PolicyNotHonoured("it cannot"), 422, "policy_not_honoured", {}),
        (
            errors.Unsatisfiable("hbm_bytes", "too much", largest_bytes=7, largest_gpus=2),
            422,
            "unsatisfiable",
            {"largest_hbm_bytes": 7, "largest_gpus": 2},
        ),
        (errors.QueueFull(9), 429, "queue_full", {"queue_jobs_max": 9}),
        (errors.NotLeader(1), 503, "database_unavailable", {}),
        (errors.DatabaseUnavailable("down"), 503, "database_unavailable", {}),
        (errors.WriterBusy("busy"), 503, "database_unavailable", {}),
        (errors.StorageFull("full"), 507, "storage_full", {}),
    ],
)
def test_each_error_of_the_scheduler_has_its_answer(
    error: errors.SchedulerError, status: int, code: str, extra: dict[str, object]
) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.code) == (status, code)
    assert extra.items() <= problem.document().items()
    assert problem.detail
    assert ("Retry-After" in problem.headers) == (status in (429, 503, 507))


def test_no_error_was_forgotten() -> None:
    def below(root: type[errors.SchedulerError]) -> Iterator[type[errors.SchedulerError]]:
        for child in root.__subclasses__():
            yield child
            yield from below(child)

    mark = test_each_error_of_the_scheduler_has_its_answer.pytestmark[0]  # type: ignore[attr-defined]
    answered = {type(case[0]) for case in mark.args[1]}
    # Only at the start, before anybody is served.
    assert set(below(errors.SchedulerError)) - answered == {errors.SchemaTooNew}
