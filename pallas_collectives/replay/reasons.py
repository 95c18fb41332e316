"""Why an order is missing: what a reader of a finding needs beside the two places."""

from __future__ import annotations

from pallas_collectives.replay.order import Event, Order
from pallas_collectives.replay.program import Access, Leave, Start, Unscope, Wait, at
from pallas_collectives.replay.views import Buffer

ENTRY_REMEDY = (
    "signal the barrier semaphore to all that write or signal here, and wait on it for all of "
    "theirs, before the first of them"
)


def not_entered(order: Order, event: Event, device: int) -> tuple[str, str]:
    """Why `event`, a copy or signal to `device`, may come before that device's kernel begins; and
    what helps.
    """
    late = _taken_from_a_later_call(order, event)
    if late is None:
        return (
            f"nothing tells device {event.device} before that device {device} has entered "
            f"{event.column.source.kernel}",
            ENTRY_REMEDY,
        )
    wait, signal = late
    return (
        f"the barrier's wait at {wait.column.source.line} can be satisfied by a signal of device "
        f"{signal.device}'s next call, at {signal.column.source.line}, while device {device} has "
        f"yet to enter {event.column.source.kernel}",
        "let no device leave the kernel before all that its barrier waits for have passed theirs: "
        "end with a second barrier on a scratch semaphore, or wait for everyone at its beginning",
    )


def _taken_from_a_later_call(order: Order, event: Event) -> tuple[Event, Event] | None:
    """A barrier's wait of this kernel before `event`, and a signal from a later kernel that it may
    take.
    """
    for (device, sem), waits in order.waits.items():
        if device != event.device or order.program.semaphores[sem].kernel:
            continue
        for wait in waits:
            if wait.count > event.count or wait.kernel != event.kernel:
                continue
            for other in order.could_take(wait)[0]:
                if other.kernel > event.kernel:
                    return wait, other
    return None


def partial_wait(
    order: Order, copy: Event, later: Event, *, of_write: bool
) -> tuple[str, str] | None:
    """The wait before `later` that took only part of what may be in flight with `copy`; None if no
    wait did.
    """
    column, position = copy.column, copy.position
    assert isinstance(column, Start)
    keys = [(copy.target, at(column.dst_sem, position))]
    if not of_write and column.src_sem is not None:
        keys.append((copy.device, at(column.src_sem, position)))
    for key in keys:
        for wait in reversed(order.waits.get(key, ())):
            if not order.knows(later, (wait.device, wait.count)):
                continue
            could, total = order.could_take(wait)
            if copy in could and wait.taken < total:
                return _partial(order, wait, len(could), total)
    return None


def _partial(order: Order, wait: Event, copies: int, total: int) -> tuple[str, str]:
    assert isinstance(wait.column, Wait)
    name = order.program.semaphores[at(wait.column.sem, wait.position)].name
    what = "a copy" if copies == 1 else f"{copies} copies"
    return (
        f"the wait at {wait.column.source.line} has had {wait.taken} of the {total} bytes that "
        f"{what} may have brought to {name} by then, and bytes arrive in no particular order",
        "wait for all of them before, give copies in flight at once a semaphore each, or let the "
        "next be sent only when a signal back (a credit) tells that the last has been used",
    )


def never_waited(
    order: Order, copy: Event, other: Event, *, of_write: bool
) -> tuple[str, str] | None:
    """That `other`'s device does not wait first for the end of a copy of its own, or of one that
    arrives; None if it does, or uses what was there before and so need not.
    """
    column, position = copy.column, copy.position
    assert isinstance(column, Start)
    keys = [(copy.target, at(column.dst_sem, position))]
    if not of_write and column.src_sem is not None:
        keys.insert(0, (copy.device, at(column.src_sem, position)))
    for key in keys:
        if key[0] != other.device:
            continue
        waits = order.waits.get(key, [])
        if any(wait.count < other.count for wait in waits):
            continue
        name, line = order.program.semaphores[key[1]].name, other.column.source.line
        before = "the kernel ends" if isinstance(other.column, Leave) else line
        what = "is in its place" if key == keys[-1] else "has left its place"
        if not waits:
            return (
                f"the copy signals {name} when it {what}, and device {other.device} never waits "
                "for that",
                f"wait for {name} before {before}",
            )
        later = waits[0].column.source.line
        if later == line or (of_write and _filled_before(order, other, copy)):
            continue
        return (
            f"the copy signals {name} when it {what}, and device {other.device} waits for that "
            f"only afterwards, at {later}",
            f"let the wait at {later} come before {line}",
        )
    return None


def both_write(one: Event, other: Event, place: str) -> tuple[str, str]:
    """That two copies write to one place, and nobody waits between them."""
    senders = sorted({one.device, other.device})
    if len(senders) == 1:
        return (
            f"device {senders[0]} starts the second without knowing that the first has arrived",
            "wait between the two for a signal that only the first's end can cause, or give each "
            "a place of its own",
        )
    return (
        f"devices {senders[0]} and {senders[1]} both write to {place}, and neither knows of the "
        "other's copy",
        "give each a place of its own, or let one wait for a signal that the other's has arrived",
    )


def _filled_before(order: Order, use: Event, copy: Event) -> bool:
    """Whether a device writes to a buffer itself, or has had it filled before, not by `copy`."""
    if isinstance(use.column, Unscope):
        return copy.column.dst.buffer not in use.column.own
    view = getattr(use.column, "view", None)
    reads = isinstance(use.column, Start) and use.column.src.buffer is copy.column.dst.buffer
    if not reads and (view is None or use.column.writes):
        return True
    buffer, earlier = copy.column.dst.buffer, False
    for event in order.events:
        if event is copy or event is use:
            continue
        column = event.column
        if isinstance(column, Start) and column.dst.buffer is buffer:
            if event.target == use.device and any(order.knows(use, m) for m in event.write_known):
                return True
        elif isinstance(column, Access) and column.writes and column.view.buffer is buffer:
            earlier |= event.device == use.device and event.count < use.count
    return earlier


def not_told(copy: Event, other: Event, buffer: Buffer) -> tuple[str, str]:
    """That the sender of a copy does not know that another device has done with its buffer."""
    done, line = other.column.source.line, copy.column.source.line
    return (
        f"nothing tells device {copy.device} that device {other.device} is done at {done} with "
        f"what {buffer.name} held before",
        f"let device {other.device} signal device {copy.device} after {done} (a credit), and wait "
        f"for that before {line}; or give each copy a place of its own",
    )
