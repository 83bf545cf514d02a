"""One device, several processes: what is shared, what is out of memory, and what the killed leave behind."""

from __future__ import annotations

import os
import signal

import pytest

from lull.vmm.driver import Driver
from lull.vmm.errors import DriverError, LullMemoryError, OutOfDeviceMemory
from tests.driver_rigs import Rig
from tests.waiting import wait_until

READER = """
exported = Handle({key!r}, {nbytes})
handle = driver.import_handle({fd}, exported)
address = driver.reserve({nbytes})
driver.map(address, {nbytes}, handle)
driver.set_access(address, {nbytes}, Access.READ)
back = ctypes.create_string_buffer(8)
driver.copy(ctypes.addressof(back), address, 8)
say(f"{{handle == exported}} {{back.raw.decode()}}")
wait_for_parent()
if {touchable}:
    ctypes.memset(address, 1, 1)  # the end of this process
try:
    driver.set(address, 1, 1)
except LullMemoryError:
    os._exit(7)
"""

TAKER = """
memory = [driver.create({nbytes})]
say("taken")
wait_for_parent()
"""


def test_another_process_reads_the_same_memory_and_cannot_write_it(rig: Rig) -> None:
    memory = rig.mapped()
    memory.write(b"contents")
    free_bytes = rig.driver.free_bytes()
    fd = rig.driver.export_handle(memory.handle)
    code = READER.format(key=memory.handle.key, nbytes=memory.nbytes, fd=fd, touchable=rig.touchable)
    with rig.child(code, (fd,)) as child:
        assert child.heard() == "True contents"
        # Charged once. On a real device the other process's context takes room of its own.
        assert rig.seconds_max or rig.is_free(free_bytes)
        child.go_on()
        assert child.ended() == (-signal.SIGSEGV if rig.touchable else 7)
    os.close(fd)
    assert memory.read(8) == b"contents"
    assert rig.driver.failed is None


def test_what_a_killed_process_held_is_free(rig: Rig) -> None:
    unit = rig.unit_bytes
    free_bytes = rig.driver.free_bytes()
    # Room for the other process's context, where it has one, and for two units of ours.
    with rig.child(TAKER.format(nbytes=(free_bytes // unit - 8) * unit)) as child:
        assert child.heard() == "taken"
        with pytest.raises(OutOfDeviceMemory):
            rig.driver.create(9 * unit)
        os.kill(child.process.pid, signal.SIGKILL)
        child.ended()
    wait_until(lambda: rig.is_free(free_bytes), rig.seconds_max + 1, "freeing what the killed process held")
    rig.driver.release(rig.driver.create(9 * unit))


def forked(driver: Driver) -> str:
    """What a child forked from here is told when it uses the driver."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            driver.create(driver.granularity())
            answer = "it worked"
        except LullMemoryError as error:
            answer = f"{isinstance(error, DriverError)} {error}"
        os.write(writing, answer.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    return answer


def test_after_a_fork_the_driver_is_of_no_use_and_says_so(rig: Rig) -> None:
    memory = rig.mapped()
    memory.write(b"ours")
    answer = forked(rig.driver)
    assert answer.startswith("True")
    assert "fork" in answer
    assert memory.read(4) == b"ours"
