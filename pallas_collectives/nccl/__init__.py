"""NCCL from Python, for JAX: communicators over groups of devices, transfers, and a watchdog.

Usable alone. `create` makes a `Group` with a `Communicator` for each of this process's devices;
`send_or_recv` moves sharded arrays between devices and processes; a group with a watchdog turns a
peer that does not come into a `PeerError`. Needs the extra `gpu`.
"""

from pallas_collectives.nccl.communicator import Communicator as Communicator
from pallas_collectives.nccl.communicator import Messages as Messages
from pallas_collectives.nccl.communicator import Part as Part
from pallas_collectives.nccl.communicator import exchange as exchange
from pallas_collectives.nccl.errors import CallError as CallError
from pallas_collectives.nccl.errors import CommunicatorError as CommunicatorError
from pallas_collectives.nccl.errors import LibraryError as LibraryError
from pallas_collectives.nccl.errors import NcclError as NcclError
from pallas_collectives.nccl.errors import PeerError as PeerError
from pallas_collectives.nccl.errors import RendezvousError as RendezvousError
from pallas_collectives.nccl.group import Group as Group
from pallas_collectives.nccl.group import check as check
from pallas_collectives.nccl.group import configure as configure
from pallas_collectives.nccl.group import create as create
from pallas_collectives.nccl.group import get as get
from pallas_collectives.nccl.library import Library as Library
from pallas_collectives.nccl.library import load as load
from pallas_collectives.nccl.transfer import Transfer as Transfer
from pallas_collectives.nccl.transfer import recv as recv
from pallas_collectives.nccl.transfer import send as send
from pallas_collectives.nccl.transfer import send_or_recv as send_or_recv
