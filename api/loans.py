"""Loans and the steps that their agents have taken."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from . import schemas, views
from .services import PAGE_MAX, services_of

router = APIRouter(tags=["loans"])


@router.get("/loans", summary="List loans, newest first, without their steps")
async def list_loans(
    request: Request,
    open_only: Annotated[bool, Query(alias="open", description="Only loans that are not closed")] = False,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: str | None = None,
) -> schemas.LoanPage:
    store = services_of(request).store
    rows, next_cursor = await store.list_loans(open_only=open_only, limit=limit, cursor=cursor)
    return schemas.LoanPage(items=[views.loan_of(row) for row in rows], next_cursor=next_cursor)


@router.get("/loans/{loan_id}", summary="Show a loan with its steps")
async def show(request: Request, loan_id: str) -> schemas.Loan:
    return views.loan_of(await services_of(request).store.get_loan(loan_id))
