"""What is judged of gates that are somebody else's."""

from __future__ import annotations

import pytest

from lull.agents.doctor.findings import Status
from lull.agents.doctor.gates import GateFacts, judge_gate
from lull.agents.protocol.wire import GateState


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        (GateFacts("a", "haproxy", GateState.OPEN), Status.OK),
        (GateFacts("a", "webhook", GateState.CLOSED), Status.OK),
        (GateFacts("a", "kubernetes", GateState.UNKNOWN), Status.WARNING),
        (GateFacts("a", "haproxy", trouble="no such socket"), Status.FAILED),
        (GateFacts("a", "haproxy", trouble="not known", is_unknown_to_gateway=True), Status.NOT_APPLICABLE),
    ],
)
def test_gates(facts: GateFacts, wanted: Status) -> None:
    assert judge_gate(facts).status is wanted
