"""How many slots and semaphores the streams' channels have, where what comes waits in VMEM.

A stream has a channel in each phase. See `machinery.channel` for what a channel is.
"""

from collections.abc import Sequence
from typing import Any

from pallas_collectives.annotations import Semaphore
from pallas_collectives.kernels.machinery import channel as channels
from pallas_collectives.kernels.torus.shares import Bundle, Shares

# Slots of a channel for sums that arrive. One is being added to and sent on from, one is being
# received into; the third lets upstream start before our send from the first has ended.
SLOTS = 3


def slots(plan: Shares, bundle: Bundle, phase: int) -> int:
    """How many slots a channel has; nothing is sent on from them if one hop is all."""
    return min(SLOTS, plan.sizes[bundle.order[phase]])


def is_paired(plan: Shares, bundle: Bundle, phase: int) -> bool:
    """Whether streams go in pairs, section by section; then three slots need no credits.

    Before a device sends at hop t of a pair it has taken what came both ways at hop t - 1, and its
    own sends of hop t - 1 have ended, both ways (`take`). So what upstream has taken of ours before
    its hop t was sent when our sends of hop t - 2 had ended: those from the slot of message t - 3,
    which message t takes. Before hop 0 a device has ended the section before, and begun it with us.
    Parts of a section are sections here, too.
    """
    in_sections = (plan.sections > 1 or plan.parts > 1) and not any(plan.lines)
    return in_sections and plan.is_paired(bundle, phase)


def semaphores(plan: Shares) -> list[channels.Semaphores]:
    """Those of the streams' channels, for each bundle and phase; see `sent_by` for what is sent."""

    def of(bundle: Bundle, phase: int) -> channels.Semaphores:
        found = channels.Semaphores.of(
            bundle.streams * plan.ways,
            window=slots(plan, bundle, phase),
            credits=not is_paired(plan, bundle, phase),
        )
        return found._replace(sent=None) if phase and plan.sections == 1 else found

    return [of(bundle, phase) for bundle in plan.bundles for phase in range(len(plan.sizes))]


def sent_by(
    plan: Shares, semaphores: Sequence[channels.Semaphores], b: int, phase: int, row: Any
) -> Semaphore:
    """What counts a stream's sends in a phase: one for all where it has one section.

    Then it is in one phase at a time, and a chip has few semaphores.
    """
    number = b * len(plan.sizes) + (0 if plan.sections == 1 else phase)
    return semaphores[number].sent.at[row]
