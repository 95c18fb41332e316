"""Judges Pallas TPU kernels that talk between devices: yours, without a TPU.

    python -m pallas_collectives verify package.module:function --arg=f32[1024,128] --devices=2..8

    from pallas_collectives import verify
    verify.assert_sound(function, "f32[1024,128]", devices=(2, 4, 8))     # in a test
    print(verify.check(function, "f32[1024,128]", mesh={"x": 8}, machine="v5p:4x4x4"))

`function` is what stands inside shard_map, or a program of whole arrays that calls shard_map. Its
kernels are stepped for every device, and their copies, signals and waits put in the order that the
semaphores guarantee.

What a verdict means
--------------------
"Sound" says: on no schedule that this model allows does a device wait for ever, are two accesses
of the same memory (one of them a write) without an order, is a semaphore left over, or is a device
written to that has not entered the kernel yet or has left it. A finding says that some schedule of
the model shows it, and draws that schedule: a race on a schedule that this model allows. It does
not say that your chips, today, run into it.

The model assumes of the hardware no more than this:

* each core performs its instructions in order, and devices are as fast or slow as they like;
* the bytes of a copy are read and written in any order, at any time between its start and the
  moment that its semaphores have counted all of them;
* copies under way overtake each other, also between the same two devices;
* signals arrive in any order between any pairs of devices, and overtake copies;
* a semaphore only counts: a wait says how much has come, not from whom, nor which bytes;
* a kernel's memory and semaphores are somebody else's before it is entered and after it is left;
  barrier semaphores are there at all times;
* a scope's memory and semaphores (`pl.run_scoped`) may be those of scopes before and after it,
  within a kernel;
* a kernel that communicates, takes no barrier semaphore and has no collective id is entered by all
  devices at once: the compiler puts a barrier before it, unless `skip_device_barrier` says not to;
* the cores of a chip enter a kernel on a mesh of cores together, and leave it together.

Stricter hardware hides faults. If copies between two chips arrived in the order in which they were
started, a semaphore shared by successive steps would never be caught; if a write were seen whole or
not at all, a wait for part of the bytes would do. We know of no manual that promises either. So a
kernel can have run for years and be found faulty here; it is then safe by luck, or by a property
of the chips that it was run on.

What it does not see: values (whether the right blocks are added), the order of a core's own vector
loads and stores, other programs on the chip, faults in code that depends on the contents of arrays
which were given by shape only, and a chip's second core: v4 and v5p may split a grid's "parallel"
dimension over two, and here one core steps all of it, in order.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pallas_collectives.verify.asked import AskError as AskError
    from pallas_collectives.verify.exploring import Exploration as Exploration
    from pallas_collectives.verify.exploring import explore as explore
    from pallas_collectives.verify.findings import Finding as Finding
    from pallas_collectives.verify.judge import check as check
    from pallas_collectives.verify.testing import assert_sound as assert_sound
    from pallas_collectives.verify.verdict import Case as Case
    from pallas_collectives.verify.verdict import Verdict as Verdict

# Where each name is; the plugin for pytest is here too, and must not import JAX by itself.
_MODULES = {
    "AskError": "asked",
    "Case": "verdict",
    "Exploration": "exploring",
    "Finding": "findings",
    "Verdict": "verdict",
    "assert_sound": "testing",
    "check": "judge",
    "explore": "exploring",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
