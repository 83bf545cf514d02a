"""Nodes with their devices."""

from __future__ import annotations

from fastapi import APIRouter, Request

from . import schemas, views
from .services import services_of

router = APIRouter(tags=["nodes"])


@router.get("/nodes", summary="List nodes with their devices")
async def list_nodes(request: Request) -> schemas.NodeList:
    rows = await services_of(request).store.list_nodes()
    return schemas.NodeList(items=[views.node_of(row) for row in rows])


@router.get("/nodes/{node}", summary="Show a node by id or name")
async def show(request: Request, node: str) -> schemas.Node:
    return views.node_of(await services_of(request).store.get_node(node))
