"""What each order does. An order acts at most once: it is over, and written down as over, when its answer is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from .attempt_run import Stop
from .journal import boottime
from .loan import Loan
from .loan_without_job import refusal as refusal_without_job
from .protocol.loans import LoanState, LoanStep
from .protocol.plans import plans_refusal
from .protocol.wire import (
    LOAN_OVER,
    AttemptChanged,
    AttemptEnd,
    AttemptSpec,
    AttemptState,
    ExpectWork,
    FetchLog,
    GiveUpLoan,
    LoanChanged,
    OpenLoan,
    OrderAnswer,
    OrderEnvelope,
    Reason,
    RecallLoan,
    ReportAgain,
    RestartEngine,
    SetPolicy,
    SetRestoreBy,
    StartAttempt,
    StopAttempt,
)

if TYPE_CHECKING:
    from .daemon import Daemon

log = structlog.get_logger(__name__)


class OrderRefused(Exception):
    """The order changed nothing; the text says why."""


class Orders:
    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._journal = daemon.journal

    async def take(self, envelope: OrderEnvelope) -> None:
        """Obeys one order and writes its answer down."""
        if envelope.seq <= self._journal.highest("orders_after") or envelope.order is None:
            return
        if not self._journal.raise_to("term", envelope.term):
            self._answer(envelope, "stale", f"term {envelope.term} is over")
            return
        # The scheduler concludes from a registration what cannot start any more: older orders must not.
        if envelope.incarnation < self._journal.highest("incarnation"):
            self._answer(envelope, "stale", f"incarnation {envelope.incarnation} of this agent is over")
            return
        try:
            with self._journal.together():
                outcome = self._obey(envelope.order)
                self._answer(envelope, outcome)
        except OrderRefused as refused:
            log.info("order refused", seq=envelope.seq, kind=envelope.order.kind, why=str(refused))
            self._answer(envelope, "refused", str(refused))
        if isinstance(envelope.order, OpenLoan) and envelope.order.loan_id not in self._daemon.loans:
            row = self._journal.loan(envelope.order.loan_id)
            if row is not None and row.state is not LoanState.CLOSED:
                self._daemon.add_loan(Loan(self._daemon.node, row, self._daemon.keepers))

    def _answer(self, envelope: OrderEnvelope, outcome: str, detail: str = "") -> None:
        self._journal.order_done(
            OrderAnswer.model_validate({"seq": envelope.seq, "outcome": outcome, "detail": detail[:1000]})
        )

    def _obey(self, order: object) -> str:
        match order:
            case OpenLoan():
                self._open_loan(order)
            case StartAttempt():
                loan = self._daemon.loans.get(order.loan_id)
                why: Reason | None = Reason(code=LOAN_OVER, sentence="the loan takes no more work")
                if loan is not None and set(order.attempt.device_ids) <= set(loan.order.device_ids):
                    why = loan.add_attempt(order.attempt)
                if why is not None:
                    self._not_started(order.loan_id, order.attempt, why.code, why.sentence)
            case StopAttempt():
                if not self._stop(order.attempt_id, order.end):
                    raise OrderRefused("no such attempt is live here")
            case RecallLoan():
                self._loan(order.loan_id).recall(order.reason)
            case ExpectWork():
                self._loan(order.loan_id).expect_work(order.more)
            case GiveUpLoan():
                self._refuse_if(self._loan(order.loan_id).give_up())
            case SetRestoreBy():
                self._loan(order.loan_id).set_restore_by(order.restore_by_seconds)
            case SetPolicy():
                self._set_policy(order)
            case RestartEngine():
                self._restart(order)
            case FetchLog():
                self._daemon.logs.start(order)
            case ReportAgain():
                self._daemon.watch.tell_all()
            case _:
                return "unsupported"
        return "accepted"

    def _loan(self, loan_id: str) -> Loan:
        loan = self._daemon.loans.get(loan_id)
        if loan is None:
            raise OrderRefused("no such loan is open here")
        return loan

    # ---- loans and attempts -----------------------------------------------------------------------------------

    def _open_loan(self, order: OpenLoan) -> None:
        refusal = self._loan_refusal(order)
        state = LoanState.DRAINING if order.engine_ids else LoanState.SETTLING
        if refusal is not None:
            # It is over before it began: nothing was touched, and every attempt is proved not to have started.
            reason = Reason(code="LoanRefused", sentence=refusal)
            self._journal.report(
                LoanChanged(loan_id=order.loan_id, epoch=order.epoch, event=None, state=LoanState.CLOSED, reason=reason)
            )
            for spec in order.attempts:
                self._not_started(order.loan_id, spec, "LoanRefused", refusal)
            return
        seconds = order.restore_by_seconds
        self._journal.accept_loan(
            order,
            boot_id=self._daemon.node.boot_id,
            state=state,
            restore_by=None if seconds is None else boottime() + seconds,
        )
        self._journal.report(LoanChanged(loan_id=order.loan_id, epoch=order.epoch, event=None, state=state))
        self._journal.write_step(order.loan_id, LoanStep.ACCEPTED)

    def _loan_refusal(self, order: OpenLoan) -> str | None:
        daemon = self._daemon
        if daemon.is_stopping:
            return "this node's agent stops"
        if self._journal.loan(order.loan_id) is not None:
            return "this loan was opened here before"
        if daemon.node.disk_is_short():
            return "the agent's disk is too full to keep a journal"
        if any(not set(spec.device_ids) <= set(order.device_ids) for spec in order.attempts):
            return "an attempt names devices that are not in the loan"
        for device_id in order.device_ids:
            if device_id not in daemon.node.devices:
                return f"device {device_id} is not on this node"
            if device_id in daemon.node.quarantined:
                return daemon.node.quarantined[device_id].sentence
            other = daemon.loan_on(device_id)
            if other is not None:
                return f"device {device_id} is in loan {other.loan_id}"
            # The agent persists the highest epoch of each device and refuses lower.
            if not self._journal.raise_to(f"epoch:{device_id}", order.epoch):
                return f"epoch {order.epoch} of device {device_id} is over"
        named = set(order.engine_ids)
        for engine_id in order.engine_ids:
            if engine_id not in daemon.keepers:
                return f"engine {engine_id} is not on this node"
        if order.engine_ids and order.restore_by_seconds is None:
            return "a loan that parks an engine needs restore_by_seconds"
        jobless = refusal_without_job(order, daemon.keepers)
        if jobless is not None:
            return jobless
        wrong = plans_refusal(order.policies, order.plans)
        if wrong is not None:
            return wrong
        devices = set(order.device_ids)
        for engine_id, keeper in daemon.keepers.items():
            on = set(keeper.device_ids)
            if on & devices and engine_id not in named:
                return f"engine {keeper.name} lives on a device of the loan and is not parked for it"
            if engine_id in named and not on <= devices:
                return f"engine {keeper.name} has devices that are not in the loan"
        return None

    def _not_started(self, loan_id: str, spec: AttemptSpec, code: str, sentence: str) -> None:
        if self._journal.attempt_loan(spec.attempt_id) is not None:
            return  # it was accepted before: its own end will be reported
        self._journal.report(
            AttemptChanged(
                attempt_id=spec.attempt_id,
                job_id=spec.job_id,
                loan_id=loan_id,
                state=AttemptState.ENDED,
                end=AttemptEnd.NOT_STARTED,
                reason=Reason(code=code, sentence=sentence),
            )
        )

    def _stop(self, attempt_id: str, end: Stop) -> bool:
        return any(loan.stop_attempt(attempt_id, end) for loan in list(self._daemon.loans.values()))

    def stop_attempt(self, attempt_id: str) -> None:
        """The scheduler does not want it any more (at registration)."""
        self._stop(attempt_id, AttemptEnd.CANCELLED)

    # ---- engines ----------------------------------------------------------------------------------------------

    def _set_policy(self, order: SetPolicy) -> None:
        keeper = self._daemon.keepers.get(order.engine_id)
        if keeper is None:
            raise OrderRefused("no such engine is on this node")
        self._refuse_if(keeper.set_policy(order.version, order.policy))

    def _restart(self, order: RestartEngine) -> None:
        keeper = self._daemon.keepers.get(order.engine_id)
        if keeper is None or keeper.process is None:
            raise OrderRefused("no such supervised engine is on this node")
        for device_id in keeper.device_ids:
            loan = self._daemon.loan_on(device_id)
            if loan is not None:
                raise OrderRefused(f"device {device_id} of engine {keeper.name} is in loan {loan.loan_id}")
        keeper.want_restart()

    def _refuse_if(self, refusal: str | None) -> None:
        if refusal is not None:
            raise OrderRefused(refusal)
