"""Nodes with their devices."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .services import services_of

router = APIRouter(tags=["nodes"])


@router.get("/nodes", response_model=schemas.NodeList, responses=NOT_MODIFIED, summary="List nodes with their devices")
async def list_nodes(request: Request) -> Response:
    rows = await services_of(request).store.list_nodes()
    return answer(request, schemas.NodeList(items=[views.node_of(row) for row in rows]))


@router.get("/nodes/{node}", response_model=schemas.Node, responses=NOT_MODIFIED, summary="Show a node by id or name")
async def show(request: Request, node: str) -> Response:
    return answer(request, views.node_of(await services_of(request).store.get_node(node)))
