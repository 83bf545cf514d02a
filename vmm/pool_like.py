"""What a Runtime needs of a pool: ours, or one whose memory lives in another process.

A park and a wake are prepared, then committed or aborted. A preparation that raises has undone itself; ContentsLost
alone says that something could not be undone. One transition at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Protocol


class PoolLike(Protocol):
    @property
    def failed(self) -> str | None:
        """Why the pool is unusable for good, else None. Cheap: it is asked at every step."""
        ...

    def bytes_by_tag(self) -> Mapping[str, int]:
        """What each tag takes of the device while it is not parked."""
        ...

    def parked_tags(self) -> Set[str]: ...

    def prepare_release(self, tags: Iterable[str]) -> None:
        """Makes every backup of those tags that are not parked, and changes nothing else. Unknown tags are ignored."""
        ...

    def commit_release(self) -> None:
        """Gives the memory back. If it raises, the park is undone whole."""
        ...

    def abort_release(self) -> None: ...

    def prepare_resume(self, tags: Iterable[str]) -> None:
        """Brings those tags that are parked back, at their addresses. Unknown tags are ignored."""
        ...

    def commit_resume(self) -> None: ...

    def abort_resume(self) -> None:
        """Parked again, as before prepare_resume."""
        ...

    def resume(self, tags: Iterable[str]) -> None: ...


class PoolGuest(Protocol):
    """An allocator whose memory a pool parks and wakes. Both calls are balanced, and may nest when two are refused."""

    def before_transition(self) -> None:
        """Nothing has changed yet: what has to be adopted, forgotten or freed in the pool is so now."""
        ...

    def after_transition(self) -> None:
        """Memory is as it stays until the next one. The pool still refuses changes of its layout. Must not raise."""
        ...
