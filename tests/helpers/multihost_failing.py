"""What processes run while one of them dies, is late, or is told to stop."""

import itertools
import os
import signal
import time

import jax
from jax.experimental import multihost_utils as theirs

from multihost_inside import error_of
from pallas_collectives import multihost as ours
from pallas_collectives.multihost import agreement, votes


def hang(how):
    """Process 1 agrees to a collective and then does not enter it."""
    if jax.process_index() == 1:
        agreement.agree("sync_global_devices('hang')", timeout=10)
        if how == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        return None
    return error_of(ours.sync_global_devices, "hang", timeout=1)


class SlowClient:
    """The coordination service behind a slow network: answers take 30 ms."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        return getattr(self._client, name)

    def blocking_key_value_get(self, key, milliseconds):
        time.sleep(min(milliseconds, 30) / 1000)
        if milliseconds <= 30:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: the answer is on its way")
        return self._client.blocking_key_value_get(key, milliseconds - 30)


def sync(timeout):
    """Process 0 gives up first, and so is the one that says who is missing."""
    if jax.process_index() != 0:
        timeout *= 2
    fast = votes.coordination_client
    client = SlowClient(fast())
    votes.coordination_client = lambda: client
    try:
        return error_of(ours.sync_global_devices, "all", timeout=timeout)
    finally:
        votes.coordination_client = fast


def train():
    """The steps at which our function said stop, up to 20 steps after the first one."""
    stops = []
    for step in itertools.count():
        if ours.reached_preemption_sync_point(step):
            stops.append(step)
        if stops and step > stops[0] + 20:
            return stops
        time.sleep(0.02)


def train_beside_jax():
    """What ours and JAX's say at every step, where the notice comes in the middle of step 3."""
    answers = []
    for step in range(6):
        ours.barrier("step")
        answers.append([u.reached_preemption_sync_point(step) for u in (ours, theirs)])
        if step == 3:
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(3)
    return answers


def train_beside_the_dead():
    try:
        for step in itertools.count():
            assert not ours.reached_preemption_sync_point(step, timeout=2)
            time.sleep(0.02)
    except TimeoutError as error:
        return error.processes


def live_beside_jax():
    """What both yield, twice over, and that our own error passes through."""
    found = []
    for _ in range(2):
        with ours.live_devices(jax.devices()) as mine, theirs.live_devices(jax.devices()) as known:
            found.append([device.id for device in mine] == [device.id for device in known])
    with ours.live_devices(jax.devices()[::-1]) as mine:
        found.append([device.id for device in mine] == sorted(d.id for d in jax.devices()))
    try:
        with ours.live_devices(jax.devices()):
            raise KeyError("of the block")
    except KeyError:
        found.append(True)
    return found


def live_late():
    """Process 1 comes when the others have given up."""
    ours.barrier("together")
    if jax.process_index() == 1:
        time.sleep(4)
        return None

    def enter():
        with ours.live_devices(jax.devices(), timeout=1):
            return "all live"

    return error_of(enter)


def live_through_a_death():
    """Process 1 dies in the block; the others learn it, and go on without."""
    survivors = [device.id for device in jax.devices() if device.process_index != 1]
    try:
        with ours.live_devices(jax.devices(), timeout=40) as devices:
            assert len(devices) == len(jax.devices())
            if jax.process_index() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except theirs.ProcessFailureError as error:
        failed = sorted(device.id for device in error.failed_devices)
        told = type(error).__name__, error.processes, str(error), failed
    with ours.live_devices(jax.devices(), timeout=40) as devices:
        return told, [device.id for device in devices] == survivors
