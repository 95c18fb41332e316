"""Arrays without what only check_vma knows of them, and no kernel's arithmetic may see.

Under `check_vma=True` an array may be typed as a term of a sum over devices ("unreduced"), which
nothing may be added to; a kernel that sums it adds to it all the same.
"""

from typing import Any

import jax
from jax.extend import core
from jax.interpreters import mlir

_untyped_p = core.Primitive("pallas_untyped")
_untyped_p.def_abstract_eval(
    lambda aval: aval.update(manual_axis_type=type(aval.mat)(varying=aval.mat.varying))
)
mlir.register_lowering(_untyped_p, lambda ctx, x: [x])


def untyped(x: Any) -> Any:
    """x, neither reduced nor unreduced."""
    kind = jax.typeof(x).mat
    return _untyped_p.bind(x) if kind.reduced or kind.unreduced else x
