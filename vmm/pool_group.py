"""Several pools, one a device, that park and wake as one: all of them, or none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from .errors import ContentsLost
from .pool_like import PoolLike

_Step = Callable[[PoolLike], None]


class PoolGroup:
    """Every device works at the same time. What raises ContentsLost could not be undone; all else is as before."""

    def __init__(self, pools: Sequence[PoolLike]) -> None:
        self._pools = tuple(pools)

    def prepare_release(self, tags: tuple[str, ...]) -> None:
        """All backups of all devices; not a byte is given back before they are complete."""
        self._all_or_none(lambda pool: pool.prepare_release(tags), lambda pool: pool.abort_release())

    def commit_release(self, tags: tuple[str, ...]) -> None:
        self._all_or_none(lambda pool: pool.commit_release(), lambda pool: _take_back(pool, tags))

    def abort_release(self) -> None:
        self._undo_each(self._pools, lambda pool: pool.abort_release(), None)

    def prepare_resume(self, tags: tuple[str, ...]) -> None:
        self._all_or_none(lambda pool: pool.prepare_resume(tags), lambda pool: pool.abort_resume())

    def commit_resume(self) -> None:
        for pool in self._pools:
            pool.commit_resume()

    def abort_resume(self, error: BaseException | None = None) -> None:
        self._undo_each(self._pools, lambda pool: pool.abort_resume(), error)

    def _all_or_none(self, act: _Step, undo: _Step) -> None:
        """If one fails, the others are undone and its error is raised."""
        if len(self._pools) == 1:
            act(self._pools[0])
            return
        with ThreadPoolExecutor(len(self._pools), thread_name_prefix="lull-device") as executor:
            futures = [executor.submit(act, pool) for pool in self._pools]
        failures = [error for future in futures if (error := future.exception()) is not None]
        if not failures:
            return
        first = next((error for error in failures if isinstance(error, ContentsLost)), failures[0])
        done = [pool for pool, future in zip(self._pools, futures, strict=True) if future.exception() is None]
        self._undo_each(done, undo, first)
        raise first

    @staticmethod
    def _undo_each(pools: Sequence[PoolLike], undo: _Step, error: BaseException | None) -> None:
        """Undoes every pool, also behind one that fails; then raises what could not be undone."""
        failures: list[Exception] = []
        for pool in pools:
            try:
                undo(pool)
            except Exception as second:  # noqa: BLE001  raised below, once all others are undone
                failures.append(second)
        if not failures:
            return
        for failure in failures:
            if isinstance(failure, ContentsLost):
                raise failure from error
        raise ContentsLost("undoing a park or wake", lost=(), parked=(), live=()) from failures[0]


def _take_back(pool: PoolLike, tags: tuple[str, ...]) -> None:
    try:
        pool.resume(tags)
    except ContentsLost:
        raise
    except Exception as error:
        held = pool.bytes_by_tag().keys() & set(tags)
        raise ContentsLost("the park", lost=(), parked=held, live=()) from error
