"""Arrays without the types "reduced" and "unreduced", which a kernel's arithmetic must not see.

Under `check_vma=True` an array may be typed as a term of a sum over devices ("unreduced"). JAX lets
nothing be added to such an array, but a kernel that sums it must.
"""

from typing import Any

from jax.extend import core

from pallas_collectives import _compat

_untyped_p = core.Primitive("pallas_untyped")
_untyped_p.def_abstract_eval(_compat.only_varying)
_compat.register(_untyped_p, lowering=lambda ctx, x: [x])


def untyped(x: Any) -> Any:
    """x, typed as neither reduced nor unreduced."""
    kind = _compat.manual_type(x)
    return _untyped_p.bind(x) if kind.reduced or kind.unreduced else x
