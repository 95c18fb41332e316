"""Faults of channels, planted: what a kernel does without a wait or a credit."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_collectives.kernels.machinery import sync
from pallas_collectives.kernels.machinery.channel import Channel

Patch = Callable[[pytest.MonkeyPatch], None]


def no_wait(of_sums: bool) -> Patch:
    """For what comes inwards, in slots, or for what comes outwards, to its place."""
    receive = Channel.receive

    def receive_others(self: Channel, number: Any, place: Any) -> None:
        if (self.slots is not None) != of_sums:
            receive(self, number, place)

    return lambda patch: patch.setattr(Channel, "receive", receive_others)


def no_credits(patch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a free slot, and nobody says that one is free."""
    patch.setattr(Channel, "wait_until_free", lambda *_: None)
    patch.setattr(Channel, "release", lambda *_: None)


def one_semaphore(of_sums: bool) -> Patch:
    """For all that comes inwards, or for all that comes outwards."""
    own = Channel._arrived

    def first(self: Channel, number: Any) -> Any:
        return own(self, jnp.int32(0) if (self.slots is not None) == of_sums else number)

    return lambda patch: patch.setattr(Channel, "_arrived", first)


def drop_credits(patch: pytest.MonkeyPatch, name: str = "semaphore_wait") -> None:
    """Nobody waits for credits, or, by its name, signals them; barriers remain."""
    own = getattr(pl, name)

    def only_in_barriers(semaphore: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(semaphore, "transforms", ()):  # the barrier's is a bare one
            own(semaphore, *args, **kwargs)

    patch.setattr(pl, name, only_in_barriers)


def drop_receives(patch: pytest.MonkeyPatch, dimensions: int) -> None:
    """Nobody waits for what comes; so many dimensions: those of the semaphores `arrived` alone."""
    wait = sync.wait

    def for_sends_only(semaphore: Any, ref: Any, times: Any = 1) -> None:
        if len(semaphore.ref.shape) != dimensions:
            wait(semaphore, ref, times)

    patch.setattr(sync, "wait", for_sends_only)
