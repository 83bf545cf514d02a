"""What a loan would release of an engine, and what loans were predicted to do beside what they did."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ..agents.protocol.loans import LoanStep
from ..agents.protocol.plans import Plan
from ..scheduler import model
from ..scheduler.plan_answer import ShownWay
from . import schemas
from .caching import answer
from .services import now, services_of

router = APIRouter(tags=["engines"])


@router.get(
    "/engines/{engine}/plan",
    response_model=schemas.EnginePlan,
    summary="What a loan would release of the engine for a need, and what else there is",
)
async def plan(
    request: Request,
    engine: str,
    hbm_bytes: Annotated[int, Query(ge=1, le=2**50, description="Free bytes that each device has to show")],
    gpus: Annotated[
        int | None, Query(ge=1, le=1024, description="On so many devices; all of the engine's unless given")
    ] = None,
) -> Response:
    found = await services_of(request).store.engine_plan(engine, hbm_bytes, gpus, now())
    blocker = found.blocker
    return answer(
        request,
        schemas.EnginePlan(
            engine_id=found.engine.id,
            engine=found.engine.name,
            need_bytes=hbm_bytes,
            gpus=found.gpus,
            plan=None if found.chosen is None else _way(found.chosen),
            alternatives=[_way(each) for each in found.alternatives],
            nothing_suffices=found.nothing_suffices,
            not_now=None
            if blocker is None
            else schemas.ReasonView(code=blocker.code, sentence=blocker.sentence, data=dict(blocker.data)),
        ),
    )


def _way(way: ShownWay) -> schemas.PlanWay:
    return schemas.PlanWay(
        tags=list(way.plan.tags),
        modes={tag: str(mode) for tag, mode in way.plan.modes.items()},
        whole=way.plan.whole,
        measured=way.plan.known,
        freed_bytes=dict(way.plan.freed_bytes),
        room_bytes={str(device): nbytes for device, nbytes in way.room_bytes.items()},
        park_seconds=way.plan.park_seconds,
        wake_seconds=way.plan.wake_seconds,
        with_engines={str(engine_id): list(other.tags) for engine_id, other in way.others.items()},
        why_not=way.why_not,
    )


def plans_of(row: model.LoanRow) -> list[schemas.LoanPlan]:
    """Of each engine of the loan: what was predicted, and what its steps say that happened."""
    return [
        schemas.LoanPlan(
            engine_id=engine_id,
            tags=sorted(row.plans[engine_id].modes if engine_id in row.plans else _whole_modes(row, engine_id)),
            whole=engine_id not in row.plans or row.plans[engine_id].whole,
            predicted=_predicted(row.plans.get(engine_id)),
            happened=_happened(row, engine_id),
        )
        for engine_id in row.engine_ids
    ]


def _whole_modes(row: model.LoanRow, engine_id: model.EngineId) -> dict[str, str]:
    return {} if engine_id not in row.policies else dict.fromkeys(row.policies[engine_id].restore_modes, "")


def _predicted(plan: Plan | None) -> schemas.PlanFigures | None:
    if plan is None:
        return None
    return schemas.PlanFigures(
        freed_bytes=dict(plan.freed_bytes), park_seconds=plan.park_seconds, wake_seconds=plan.wake_seconds
    )


def _happened(row: model.LoanRow, engine_id: str) -> schemas.PlanFigures | None:
    """None before its memory was proved free, and in lists, which carry no steps."""
    last = {step.step: step for step in row.steps if step.engine_id == engine_id}
    settled = last.get(LoanStep.SETTLED)
    if settled is None:
        return None
    return schemas.PlanFigures(
        freed_bytes=dict(settled.data.get("freed_bytes", {})),
        park_seconds=_between(last.get(LoanStep.PARK_SENT), settled),
        wake_seconds=_between(last.get(LoanStep.RESUME_SENT), last.get(LoanStep.VERIFIED)),
    )


def _between(first: model.StepRow | None, then: model.StepRow | None) -> float | None:
    if first is None or then is None or then.monotonic_seconds < first.monotonic_seconds:
        return None
    return round(then.monotonic_seconds - first.monotonic_seconds, 3)
