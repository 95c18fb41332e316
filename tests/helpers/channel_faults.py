"""Faults of channels, planted: what a kernel does without a wait or a credit."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

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
