"""Loans and the steps that their agents have taken."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .services import PAGE_MAX, now, principal_of, services_of

router = APIRouter(tags=["loans"])


@router.get(
    "/loans",
    response_model=schemas.LoanPage,
    responses=NOT_MODIFIED,
    summary="List loans, newest first, without their steps",
)
async def list_loans(
    request: Request,
    open_only: Annotated[bool, Query(alias="open", description="Only loans that are not closed")] = False,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: str | None = None,
) -> Response:
    store = services_of(request).store
    rows, next_cursor = await store.list_loans(open_only=open_only, limit=limit, cursor=cursor)
    return answer(request, schemas.LoanPage(items=[views.loan_of(row) for row in rows], next_cursor=next_cursor))


@router.get(
    "/loans/{loan_id}", response_model=schemas.Loan, responses=NOT_MODIFIED, summary="Show a loan with its steps"
)
async def show(request: Request, loan_id: str) -> Response:
    return answer(request, views.loan_of(await services_of(request).store.get_loan(loan_id)))


@router.post(
    "/loans/{loan_id}/recall",
    status_code=202,
    summary="End a loan early; its jobs are preempted and queued again",
)
async def recall(request: Request, response: Response, loan_id: str) -> schemas.Loan:
    row = await services_of(request).store.recall_loan(loan_id, principal_of(request), now())
    response.headers["Location"] = f"/api/v1/loans/{row.id}"
    return views.loan_of(row)


@router.post(
    "/loans/{loan_id}/give-up",
    status_code=202,
    summary="Close a faulted loan as it is; the gates of its engines stay closed",
)
async def give_up(request: Request, response: Response, loan_id: str) -> schemas.Loan:
    row = await services_of(request).store.give_up_loan(loan_id, principal_of(request), now())
    response.headers["Location"] = f"/api/v1/loans/{row.id}"
    return views.loan_of(row)
