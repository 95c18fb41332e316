"""Arrays without what only check_vma knows of them, and no kernel's arithmetic may see.

Under `check_vma=True` an array may be typed as a term of a sum over devices ("unreduced"), which
nothing may be added to; a kernel that sums it adds to it all the same.
"""

from typing import Any

from jax.extend import core

from pallas_collectives import _compat

_untyped_p = core.Primitive("pallas_untyped")
_untyped_p.def_abstract_eval(_compat.only_varying)
_compat.register(_untyped_p, lowering=lambda ctx, x: [x])


def untyped(x: Any) -> Any:
    """x, neither reduced nor unreduced."""
    kind = _compat.manual_type(x)
    return _untyped_p.bind(x) if kind.reduced or kind.unreduced else x
