from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from lull.agents.protocol.policy import EnginePolicy
from lull.api.problems import PROBLEMS, Problem, invalid_field, invalid_request
from lull.scheduler.requests import JobRequest


def _detail(body: object) -> str:
    with pytest.raises(ValidationError) as caught:
        JobRequest.model_validate_json(json.dumps(body))
    return invalid_request(caught.value.errors(), known=JobRequest.model_fields, where="body").detail


def test_a_problem_is_a_document_with_a_stable_code() -> None:
    response = Problem("queue_full", "later", headers={"Retry-After": "3"}, extra={"queue_jobs_max": 7}).response()
    assert response.status_code == 429
    assert response.media_type == "application/problem+json"
    assert response.headers["retry-after"] == "3"
    assert json.loads(bytes(response.body)) == {
        "type": "urn:lull:problem:queue_full",
        "title": "The queue is full",
        "status": 429,
        "code": "queue_full",
        "detail": "later",
        "queue_jobs_max": 7,
    }


def test_every_code_has_an_error_status_and_a_title() -> None:
    for code, (status, title) in PROBLEMS.items():
        assert 400 <= status < 600, code
        assert title[0].isupper(), code


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"argv": ["a"], "priorty": 3}, "priorty: unknown field; did you mean 'priority'?"),
        ({"argv": ["a"], "zzz": 3}, "zzz: unknown field; leave it out (known: argv, "),
        ({}, "argv: is required; add it"),
        ({"argv": []}, "argv: "),
        ({"argv": ["a"], "gpus": "two"}, "gpus: input should be a valid integer"),
        ({"argv": ["a"], "gpus": 0}, "gpus: input should be greater than or equal to 1"),
        ({"argv": "a"}, "argv: "),
        ({"argv": ["a", 3]}, "argv.1: input should be a valid string; give text"),
        ({"argv": ["a"], "workdir": "x"}, "workdir: give an absolute path"),
        ([], "body: "),
    ],
)
def test_an_invalid_body_names_the_field_and_the_way_out(body: object, says: str) -> None:
    assert says in _detail(body)


def test_each_wrong_field_is_listed() -> None:
    detail = _detail({"gpus": 0, "x": 1})
    assert detail.count(";") >= 2
    assert "argv" in detail
    assert "gpus" in detail


def test_a_policy_field_that_is_not_obeyed_yet_keeps_its_own_words() -> None:
    with pytest.raises(ValidationError) as caught:
        EnginePolicy.model_validate({"windows": []})
    problem = invalid_request(caught.value.errors(), known=EnginePolicy.model_fields, where="body")
    assert problem.detail == (
        "body: windows: this version does not do lending in time windows yet; leave the field out"
    )


def test_one_field() -> None:
    problem = invalid_field("since", "must be before until")
    assert problem.status == 422
    assert problem.document()["errors"] == [{"field": "since", "message": "must be before until"}]
