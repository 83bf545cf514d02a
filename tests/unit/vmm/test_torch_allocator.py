"""The allocator in C on the fake driver. Torch itself is not there: the CPU build cannot use it."""

from __future__ import annotations

import ctypes
import errno
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lull.vmm import torch_allocator
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.errors import ContentsLost, DriverError, LullMemoryError, OutOfDeviceMemory, TransitionInProgress
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from lull.vmm.torch_allocator import AllocatorGuest, guest_of, last_outcome
from tests.fake_cuda.fixtures import reset_fake_cuda
from tests.fake_cuda.library import GRANULE_BYTES, FakeCuda, load

UNKNOWN_ERROR = 999
ADDRESS_FREE = "cuMemAddressFree"
MAKING = ("cuCtxPushCurrent", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess")
UNMAKING = ("cuCtxPushCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemRelease", ADDRESS_FREE)


@pytest.fixture
def cuda_pool(fake_cuda: FakeCuda) -> Iterator[Pool]:
    driver = CudaDriver(CudaDriver.devices()[0])
    pool = Pool(driver)
    yield pool
    if isinstance(pool.guest, AllocatorGuest):
        pool.guest.close()
    pool.close()
    assert fake_cuda.live("handles") == fake_cuda.live("mappings") == fake_cuda.live("reservations") == 0


@pytest.fixture
def guest(cuda_pool: Pool) -> AllocatorGuest:
    return guest_of(cuda_pool)


def malloc(nbytes: int, device: int = 0) -> int | None:
    address: int | None = torch_allocator._library().lull_allocator_malloc(nbytes, device, None)
    return address


def free(address: int | None) -> None:
    torch_allocator._library().lull_allocator_free(address, 0, 0, None)


def made(nbytes: int) -> int:
    address = malloc(nbytes)
    assert address, last_outcome()
    return address


def test_memory_is_made_and_freed(guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", None):
        address = made(GRANULE_BYTES + 1)
    assert (fake_cuda.live("handles"), fake_cuda.live("mappings")) == (1, 1)
    ctypes.memset(address, 7, GRANULE_BYTES + 1)
    free(address)
    assert fake_cuda.everything_live() == dict.fromkeys(fake_cuda.everything_live(), 0)
    assert last_outcome() == (0, "")


def test_it_parks_and_wakes_at_its_address(cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", RestoreMode.CPU):
        weights = made(3 * GRANULE_BYTES)
        with guest.scope("kv_cache", None):
            cache = made(GRANULE_BYTES)
        more = made(100)
    ctypes.memset(weights, 7, 3 * GRANULE_BYTES)
    ctypes.memset(more, 9, 100)
    for _ in range(2):
        cuda_pool.release(["kv_cache"])
        assert fake_cuda.live("handles") == 2
        cuda_pool.release(["model_weights"])
        assert fake_cuda.live("handles") == fake_cuda.live("mappings") == 0
        cuda_pool.resume(["model_weights", "kv_cache"])
        assert ctypes.string_at(weights, 3 * GRANULE_BYTES) == b"\7" * 3 * GRANULE_BYTES
        assert ctypes.string_at(more, 100) == b"\t" * 100
    assert sorted((a.address, a.nbytes, a.tag) for a in cuda_pool.allocations()) == sorted(
        [
            (weights, 3 * GRANULE_BYTES, "model_weights"),
            (cache, GRANULE_BYTES, "kv_cache"),
            (more, 100, "model_weights"),
        ]
    )
    for address in (weights, cache, more):
        free(address)  # under handles that the pool has made since
    assert fake_cuda.live("handles") == fake_cuda.live("reservations") == 0


def test_a_tag_of_ones_own_is_known_when_its_scope_ends(cuda_pool: Pool, guest: AllocatorGuest) -> None:
    runtime = Runtime(cuda_pool)
    with guest.scope("optimizer", None):
        address = made(100)
    assert cuda_pool.bytes_by_tag() == {"optimizer": GRANULE_BYTES}
    runtime.release(["optimizer"])
    assert cuda_pool.device_bytes() == 0
    runtime.resume()
    free(address)
    guest.settle()
    assert cuda_pool.bytes_by_tag() == {}


def test_a_free_while_parked(cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", None):
        dropped, kept = made(100), made(100)
        ctypes.memset(kept, 3, 100)
        cuda_pool.release(["model_weights"])
        free(dropped)  # what torch.cuda.empty_cache comes to
        assert last_outcome() == (0, "")
        assert (malloc(100), last_outcome()[0]) == (None, torch_allocator.PARKED)
        cuda_pool.resume(["model_weights"])
        assert [a.address for a in cuda_pool.allocations()] == [kept]
        assert cuda_pool.backup_bytes() <= GRANULE_BYTES
        again = made(100)
    assert ctypes.string_at(kept, 100) == b"\3" * 100
    free(kept)
    free(again)


def test_a_pool_that_is_closed_too_early_ends_its_transitions(cuda_pool: Pool, guest: AllocatorGuest) -> None:
    with guest.scope("model_weights", None):
        address = made(100)
    cuda_pool.free(cuda_pool.allocations()[0])
    cuda_pool.release(["kv_cache"])
    cuda_pool.resume(["kv_cache"])
    free(address)
    assert last_outcome()[0] != 0


def test_a_free_between_prepare_and_commit_waits(cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", None):
        address, other = made(100), made(100)
        cuda_pool.prepare_release(["model_weights"])
        free(address)
        assert fake_cuda.live("handles") == 2
        assert (malloc(100), last_outcome()[0]) == (None, torch_allocator.FROZEN)
        cuda_pool.abort_release()
        assert fake_cuda.live("handles") == 1
        third = made(100)
    cuda_pool.release(["model_weights"])
    assert fake_cuda.live("handles") == 0
    cuda_pool.resume(["model_weights"])
    free(other)
    free(third)


def test_a_second_transition_is_refused_and_freezes_nothing(cuda_pool: Pool, guest: AllocatorGuest) -> None:
    with guest.scope("model_weights", None):
        address = made(100)
        cuda_pool.prepare_release(["model_weights"])
        with pytest.raises(TransitionInProgress):
            cuda_pool.prepare_release(["model_weights"])
        cuda_pool.abort_release()
        free(address)
        free(made(100))


def test_out_of_memory_is_null(cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", None):
        held = made(20 * GRANULE_BYTES)
        assert malloc(20 * GRANULE_BYTES) is None
        assert last_outcome() == (torch_allocator.OUT_OF_MEMORY, "cuMemCreate failed with CUDA error 2")
        # An outcome is the call's alone: no later one sees it.
        free(made(GRANULE_BYTES))
        assert last_outcome() == (0, "")
        cuda_pool.release(["model_weights"])
        thief = cuda_pool.driver.create(20 * GRANULE_BYTES)
        with pytest.raises(OutOfDeviceMemory):
            cuda_pool.resume(["model_weights"])
        cuda_pool.driver.release(thief)
        cuda_pool.resume(["model_weights"])
    free(held)


@pytest.mark.parametrize("name", MAKING)
def test_an_error_while_making_leaks_nothing(guest: AllocatorGuest, fake_cuda: FakeCuda, name: str) -> None:
    with guest.scope("model_weights", None):
        fake_cuda.fail(name, UNKNOWN_ERROR)
        assert malloc(100) is None
        assert last_outcome() == (UNKNOWN_ERROR, f"{name} failed with CUDA error {UNKNOWN_ERROR}")
        assert fake_cuda.everything_live() == dict.fromkeys(fake_cuda.everything_live(), 0)
        free(made(100))


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("name", UNMAKING)
def test_an_error_while_freeing_is_made_good_later(
    cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda, name: str, adopted: bool
) -> None:
    with guest.scope("model_weights", RestoreMode.CPU):
        address, other = made(100), made(100)
        ctypes.memset(other, 6, 100)
        if adopted:
            guest.settle()
        fake_cuda.fail(name, UNKNOWN_ERROR)
        free(address)
        assert last_outcome() == (UNKNOWN_ERROR, f"{name} failed with CUDA error {UNKNOWN_ERROR}")
    # The pool does not touch what is half gone, and the end of any transition is an occasion to finish it.
    cuda_pool.release(["model_weights"])
    assert fake_cuda.live("reservations") == 1
    cuda_pool.resume(["model_weights"])
    assert ctypes.string_at(other, 100) == b"\6" * 100
    free(other)
    assert fake_cuda.live("handles") == fake_cuda.live("reservations") == 0


@pytest.mark.parametrize("nth_call", range(1, 12))
def test_a_transition_that_fails_leaves_the_allocator_right(
    cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda, nth_call: int
) -> None:
    with guest.scope("model_weights", RestoreMode.CPU):
        address = made(100)
        ctypes.memset(address, 5, 100)
        fake_cuda.fail("*", UNKNOWN_ERROR, nth_call=nth_call)
        try:
            cuda_pool.release(["model_weights"])
            cuda_pool.resume(["model_weights"])
        except LullMemoryError:
            fake_cuda.forget_faults()
            cuda_pool.resume(["model_weights"])
        fake_cuda.forget_faults()
        assert ctypes.string_at(address, 100) == b"\5" * 100
        free(address)
        assert last_outcome() == (0, "")
        free(made(100))
    assert fake_cuda.live("handles") == fake_cuda.live("reservations") == 0


STEPS = st.one_of(
    st.tuples(st.just("malloc"), st.integers(1, 3 * GRANULE_BYTES)),
    st.tuples(st.just("free"), st.integers(0, 20)),
    st.tuples(st.just("fault"), st.integers(1, 12)),
    st.tuples(st.sampled_from(["release", "resume", "abort_release", "abort_resume", "settle"]), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=30))
def test_whatever_happens_contents_and_accounts_are_right(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Also while the tag is parked or between prepare and abort, and with a driver that refuses at any call."""
    fake = load()
    with pytest.MonkeyPatch.context() as patch:
        reset_fake_cuda(fake, patch, tmp_path_factory.mktemp("fake"))
        pool = Pool(CudaDriver(CudaDriver.devices()[0]))
        guest = guest_of(pool)
        live: dict[int, bytes] = {}
        with guest.scope("model_weights", RestoreMode.CPU):
            for number, (step, argument) in enumerate(steps):
                parked = bool(pool.parked_tags())
                try:
                    if step == "malloc" and (address := malloc(argument)) is not None:
                        assert not parked
                        assert address not in live
                        live[address] = bytes([number + 1]) * argument
                        ctypes.memmove(address, live[address], argument)
                    elif step == "free" and live:
                        address = sorted(live)[argument % len(live)]
                        del live[address]
                        free(address)
                    elif step == "fault":
                        fake.fail("*", UNKNOWN_ERROR, nth_call=argument)
                    elif step == "settle":
                        guest.settle()
                    elif step == "abort_release":
                        pool.prepare_release(["model_weights"])
                        if live:
                            live.pop(dropped := min(live))
                            free(dropped)
                        pool.abort_release()
                    elif step == "abort_resume":
                        pool.prepare_resume(["model_weights"])
                        pool.abort_resume()
                    elif step in {"release", "resume"}:
                        getattr(pool, step)(["model_weights"])
                except ContentsLost:
                    break  # said, and the pool can do nothing more
                except LullMemoryError:
                    assert pool.failed is None
                if not pool.parked_tags():
                    assert all(ctypes.string_at(at, len(content)) == content for at, content in live.items())
            fake.forget_faults()
            if pool.failed is None:
                pool.resume(["model_weights"])
                assert all(ctypes.string_at(at, len(content)) == content for at, content in live.items())
                for address in live:
                    free(address)
                pool.release([])
                assert fake.live("handles") == fake.live("mappings") == fake.live("reservations") == 0
        guest.close()
        fake.reset()


def test_who_is_in_no_scope_gets_nothing(guest: AllocatorGuest) -> None:
    assert (malloc(100), last_outcome()[0]) == (None, torch_allocator.NO_SCOPE)
    with guest.scope("model_weights", None):
        assert (malloc(100, device=3), last_outcome()[0]) == (None, torch_allocator.WRONG_DEVICE)
        results: list[tuple[int | None, int]] = []
        thread = threading.Thread(target=lambda: results.append((malloc(100), last_outcome()[0])))
        thread.start()
        thread.join(30)
        assert results == [(None, torch_allocator.NO_SCOPE)]


def test_a_strange_address_is_refused(guest: AllocatorGuest) -> None:
    free(0x1234000)
    assert last_outcome()[0] == torch_allocator.UNKNOWN_ADDRESS


def test_a_free_waits_for_what_the_device_does(guest: AllocatorGuest, fake_cuda: FakeCuda) -> None:
    with guest.scope("model_weights", None):
        address = made(100)
    before = fake_cuda.calls("cuCtxSynchronize")
    free(address)
    assert fake_cuda.calls("cuCtxSynchronize") == before + 1


def test_threads_allocate_and_free_while_others_hold_the_gil(
    cuda_pool: Pool, guest: AllocatorGuest, fake_cuda: FakeCuda
) -> None:
    """PyDLL keeps the GIL over the call, as torch may. The contrast is the next test."""
    keeping_the_gil = ctypes.PyDLL(torch_allocator.library_path())
    keeping_the_gil.lull_allocator_malloc.restype = ctypes.c_void_p
    keeping_the_gil.lull_allocator_free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    done: list[int] = []

    def work(number: int) -> None:
        with guest.scope(f"tag_{number}", None):
            for _ in range(200):
                if number % 2:
                    address = malloc(100)
                    free(address)
                else:
                    address = keeping_the_gil.lull_allocator_malloc(ctypes.c_ssize_t(100), 0, None)
                    keeping_the_gil.lull_allocator_free(address, 0, 0, None)
        done.append(number)

    def park() -> None:
        for _ in range(10):
            cuda_pool.release(["tag_0"])
            cuda_pool.resume(["tag_0"])
        done.append(-1)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    threads.append(threading.Thread(target=park, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(done) == [-1, 0, 1, 2, 3]
    cuda_pool.release(["tag_0"])  # whose end frees what was put off
    cuda_pool.resume(["tag_0"])
    assert fake_cuda.live("handles") == 0


def test_an_allocator_that_wants_the_gil_stands_still() -> None:
    """Why none of this is a Python callback: it holds the allocator's lock when it asks for the GIL, while the thread
    that has the GIL waits for that lock. Here a time limit on the lock ends what would be a deadlock."""
    mutex = ctypes.create_string_buffer(64)  # all zero is an initialised pthread mutex
    releasing, keeping = ctypes.CDLL(None), ctypes.PyDLL(None)
    locked, go = threading.Event(), threading.Event()

    def callback() -> None:
        releasing.pthread_mutex_lock(mutex)
        locked.set()
        go.wait(30)  # Python, so the GIL is needed before the lock can be given back
        releasing.pthread_mutex_unlock(mutex)

    until = (ctypes.c_long * 2)(int(time.time()) + 1, 0)
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=callback)
    thread.start()
    assert locked.wait(30)
    sys.setswitchinterval(30)
    try:
        go.set()
        assert keeping.pthread_mutex_timedlock(mutex, until) == errno.ETIMEDOUT
    finally:
        sys.setswitchinterval(interval)
    thread.join(30)
    assert releasing.pthread_mutex_trylock(mutex) == 0


def test_another_device_is_refused(driver: HostDriver) -> None:
    with pytest.raises(DriverError, match="HostDriver is no device"):
        guest_of(Pool(driver))


def test_a_missing_compiled_part_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_allocator, "find_spec", lambda name, package: None)
    with pytest.raises(DriverError, match=r"install a C compiler .* install gpu-lull again"):
        torch_allocator.library_path()
