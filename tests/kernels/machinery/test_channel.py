"""The channel's own steps, on either side of one hop, in every interleaving.

The steps that a sender and a receiver take are recorded from `Channel` itself. What lies between
them, messages in flight and credits, is a model: whatever is in flight arrives in any order.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from pallas_collectives.kernels.machinery import channel, sync
from pallas_collectives.kernels.machinery.channel import Channel, Semaphores
from pallas_collectives.topology.groups import RIGHT, wrap_step

Step = tuple[str, int]
MESSAGES, WINDOWS = 7, [1, 2, 3, 7, 9]


class Named:
    """Semaphores that say their name, and the last of their indices."""

    def __init__(self, name: str, *shape: int) -> None:
        self.name, self.shape = name, shape

    @property
    def at(self) -> "Named":
        return self

    def __getitem__(self, index: tuple[int, ...]) -> tuple[str, int]:
        return self.name, int(index[-1])


class Neighbours:
    core = None

    def peer(self, offset: int) -> int:
        return offset


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """What the channel does to semaphores, in order."""
    taken: list[Step] = []

    def remote_copy(source: int, target: Any, sent: Any, arrived: Step, device: int) -> None:
        assert device == RIGHT
        taken.append(("push", arrived[1]))

    def give(semaphore: Step, amount: int, device_id: int, core_index: None) -> None:
        assert (semaphore[0], amount, device_id, core_index) == ("credit", 1, -RIGHT, None)
        taken.append(("give", 0))

    monkeypatch.setattr(sync, "remote_copy", remote_copy)
    monkeypatch.setattr(sync, "wait", lambda semaphore, *_: taken.append(("wait", semaphore[1])))
    monkeypatch.setattr(channel.pl, "semaphore_signal", give)
    monkeypatch.setattr(channel.pl, "semaphore_wait", lambda *_: taken.append(("take", 0)))
    with jax.disable_jit():
        yield taken


Receive = Callable[[Channel, int], None]


def receive_and_release(one: Channel, number: int) -> None:
    one.receive(number, None)
    one.release(number)


def programs(
    steps: list[Step], window: int, receive: Receive = receive_and_release, known: bool = True
) -> tuple[list[Step], list[Step]]:
    """What a sender and a receiver of all messages do; they know how many there are, or do not."""
    semaphores = Semaphores(Named("sent", 1), Named("arrived", 1, window), Named("credit", 1))
    count: Any = {"arrivals": MESSAGES, "longest": MESSAGES} if known else {}
    one = Channel(Neighbours(), RIGHT, semaphores, (0,), **count)  # type: ignore[arg-type]
    for number in range(MESSAGES):
        one.send(number, None, number)
    sender = steps.copy()
    steps.clear()
    for number in range(MESSAGES):
        receive(one, number)
    if not known:
        one.take_credits(sum(step == ("give", 0) for step in steps) - sender.count(("take", 0)))
        steps[:] = [step for step in steps if step[0] != "take"]  # those are the sender's
    return sender, steps


def first_fault(sender: list[Step], receiver: list[Step], spare: int = 0) -> str | None:
    """Explores all interleavings; what goes wrong in one of them, or None.

    State: how far either is, the numbers of messages in flight, those that have arrived, credits.
    At the end as many credits may be left as are `spare`.
    """
    start = (0, 0, frozenset[int](), frozenset[int](), 0)
    seen, todo, ended = {start}, [start], False
    pushes = [slot for kind, slot in sender if kind == "push"]
    while todo:
        i, j, flying, arrived, credits = todo.pop()
        after = [(i, j, flying - {number}, arrived | {number}, credits) for number in flying]
        received = sum(kind == "wait" for kind, _ in receiver[:j])
        if i < len(sender):
            number = sum(kind == "push" for kind, _ in sender[:i])
            if sender[i][0] == "push":
                held = [k for k in range(received, number) if pushes[k] == pushes[number]]
                if held:
                    return f"message {number} is sent where {held} have not been received"
                after.append((i + 1, j, flying | {number}, arrived, credits))
            elif credits:
                after.append((i + 1, j, flying, arrived, credits - 1))
        if j < len(receiver):
            kind, slot = receiver[j]
            if kind == "give":
                after.append((i, j + 1, flying, arrived, credits + 1))
            elif any(pushes[number] == slot for number in arrived):
                if received not in arrived:
                    return f"another message passes for {received}"
                after.append((i, j + 1, flying, arrived - {received}, credits))
        if i == len(sender) and j == len(receiver) and not flying:
            ended = True
            if arrived or credits != spare:
                return f"{arrived} and {credits} credits are left over"
        for state in after:
            if state not in seen:
                seen.add(state)
                todo.append(state)
    return None if ended else "they wait for ever"


@pytest.mark.parametrize("window", WINDOWS)
def test_no_signal_passes_for_another(steps: list[Step], window: int) -> None:
    assert first_fault(*programs(steps, window)) is None


@pytest.mark.parametrize("window", WINDOWS)
def test_credits_that_no_message_needs_can_be_taken(steps: list[Step], window: int) -> None:
    sender, receiver = programs(steps, window, known=False)
    assert first_fault(sender, receiver, spare=min(window, MESSAGES)) is None


@pytest.mark.parametrize("window", [1, 3])
def test_a_slot_released_before_its_message_is_here_is_caught(
    steps: list[Step], window: int
) -> None:
    def too_early(one: Channel, number: int) -> None:
        one.release(number)
        one.receive(number, None)

    assert first_fault(*programs(steps, window, too_early)) is not None


def test_a_slot_that_is_never_released_is_caught(steps: list[Step]) -> None:
    found = first_fault(*programs(steps, 3, lambda one, number: one.receive(number, None)))
    assert found == "they wait for ever"


def test_messages_that_share_a_semaphore_are_caught(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "wrap_step", lambda number, window: wrap_step(number, 1))
    assert first_fault(*programs(steps, 3)) is not None


def test_a_sender_that_waits_for_no_credit_is_caught(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.pl, "semaphore_wait", lambda *_: None)
    assert first_fault(*programs(steps, 3)) is not None
