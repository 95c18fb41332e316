"""Every exception that `pallas_collectives.nccl` raises; all are `NcclError`."""

from typing import NoReturn

HARMLESS = (4, 5)  # NCCL's invalid argument and invalid usage: it has done nothing


class NcclError(RuntimeError):
    """Base of all errors of this package."""


class LibraryError(NcclError):
    """No usable libnccl: the message says which file, what failed and what to do."""


class RendezvousError(NcclError):
    """The processes of a group did not meet in time, or met under different terms."""


class ProcessError(NcclError):
    """The GPUs of a group are several processes', and the call is for those of one."""


class CallError(NcclError):
    """A CUDA or NCCL call returned a non-zero result; carries the library's own text.

    Attributes:
      call: the function that failed, e.g. `ncclAllGather`.
      result: its numeric result.
    """

    def __init__(self, call: str, result: int, text: str, where: str = "", remedy: str = ""):
        """where: what it was called on. remedy: what to do about it, as sentences."""
        place = f", on {where}" if where else ""
        super().__init__(f"{call} returned {result}: {text}{place}" + (remedy and f". {remedy}"))
        self.call = call
        self.result = result

    @property
    def leaves_nccl_half_done(self) -> bool:
        """Whether NCCL failed on the way, and not for the caller's arguments."""
        return self.call.startswith("nccl") and self.result not in HARMLESS


class CommunicatorError(NcclError):
    """A communicator was used after it was closed or aborted."""


class PeerError(CommunicatorError):
    """A group was aborted because a peer did not come, died, or made another call.

    Attributes:
      group: the group's name and devices, as text.
      call: the collective that this group was in, e.g. `all_gather float32[1024]`.
      sequence: that call's number on the group's communicators, from 0.
      missing: the ranks that did not come to it; empty where the calls disagree.
    """

    def __init__(
        self, message: str, *, group: str, call: str, sequence: int, missing: tuple[int, ...]
    ):
        super().__init__(message)
        self.group = group
        self.call = call
        self.sequence = sequence
        self.missing = missing


def raise_for(error: Exception, better: Exception) -> NoReturn:
    """Raises `better`, caused by `error`, or `error` itself if there is nothing better.

    An exception must not be its own cause: JAX follows causes to their end, for ever in a cycle.
    """
    if better is error:
        raise error
    raise better from error
