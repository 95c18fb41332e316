"""Errors that name the value, the rule it breaks, and what to do instead."""


class CollectiveError(ValueError):
    """A collective that cannot run as asked; raised while tracing, before anything is launched."""

    def __init__(self, value: str, rule: str, remedy: str) -> None:
        super().__init__(f"{value}: {rule}; {remedy}.")
        self._said = value, rule, remedy

    def __reduce__(self) -> tuple[type["CollectiveError"], tuple[str, str, str]]:
        """So that it can be pickled, and pass from a worker process to the one that waits."""
        return type(self), self._said


class UnboundAxisError(CollectiveError, NameError):
    """An axis name that no mesh in scope binds."""


class AlgorithmError(CollectiveError):
    """An algorithm that does not exist, or that the chip or the shape cannot run."""


class ReachError(AlgorithmError):
    """A collective whose devices the chip cannot write to from one another."""


class EngineError(AlgorithmError):
    """A kernel that the engine asked for, a SparseCore, cannot run."""


class BackendError(CollectiveError):
    """A backend that does not exist, or that is not there on this platform."""


class UnservedError(BackendError, NotImplementedError):
    """A collective that a backend has no function for; lax raises a NotImplementedError."""


class StartedError(CollectiveError, AttributeError):
    """An attribute of a collective's result that is asked for before the result is."""


class DtypeError(CollectiveError, TypeError):
    """A dtype that the backend cannot move or reduce."""


class VmemError(CollectiveError):
    """A kernel that would need more VMEM than the chip has."""


class TableError(CollectiveError):
    """A table of times that cannot be read (see `tuning.choice`)."""


class SliceError(CollectiveError):
    """A collective whose devices lie in several slices (see `slices`)."""


class SlowerError(CollectiveError):
    """A collective that lax does faster: by a measured table (`tuning.choice`), or as it lies."""


class WireError(CollectiveError):
    """A wire that does not exist, or that would take more bytes than it saves (see `wires`)."""
