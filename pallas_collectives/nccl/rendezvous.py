"""How the processes of a group meet: the first hands each of the others NCCL's unique id.

Every joiner writes a fresh token under its own key; the root answers each under another key with
that token, a nonce and the id. An answer with another token is an earlier attempt's: it cannot
lead anybody to a root that is long gone, and no process has to count attempts.
"""

import dataclasses
import json
import time
import uuid
from collections.abc import Callable

from pallas_collectives.nccl.errors import RendezvousError
from pallas_collectives.nccl.store import Store

_RETRY = 0.05  # seconds between looks at an answer that is still an earlier attempt's


@dataclasses.dataclass(frozen=True)
class Meeting:
    """What the processes agreed on.

    Attributes:
      nonce: unlike that of any other meeting, under the same key or not.
      unique_id: NCCL's, 128 bytes.
    """

    nonce: str
    unique_id: bytes


def meet(
    store: Store,
    key: str,
    process: int,
    processes: tuple[int, ...],
    timeout: float,
    new_id: Callable[[], bytes],
    terms: str,
) -> Meeting:
    """Brings `processes` together under `key`; `processes[0]` is the root and calls `new_id`.

    timeout: seconds for everyone to come. terms: text that must be equal in all processes.
    Raises RendezvousError, which names who is missing or whose terms differ.
    """
    deadline = time.monotonic() + timeout
    if process == processes[0]:
        return _lead(store, key, processes[1:], deadline, timeout, new_id, terms)
    return _join(store, key, process, processes[0], deadline, timeout, terms)


def _lead(
    store: Store,
    key: str,
    joiners: tuple[int, ...],
    deadline: float,
    timeout: float,
    new_id: Callable[[], bytes],
    terms: str,
) -> Meeting:
    hellos, missing = {}, []
    for joiner in joiners:
        try:
            hello = store.get(f"{key}/hello/{joiner}", max(deadline - time.monotonic(), 0.01))
            hellos[joiner] = json.loads(hello)
        except RendezvousError:
            missing.append(joiner)
    if missing:
        raise RendezvousError(
            f"processes {missing} did not come to create {key!r} in {timeout:g} s: every process "
            "that owns one of its devices must create it, under the same name"
        )
    meeting = Meeting(uuid.uuid4().hex, new_id())
    others = {j: hello["terms"] for j, hello in hellos.items() if hello["terms"] != terms}
    wrong = f"{key!r} means {terms!r} here and otherwise in processes {others}" if others else ""
    for joiner, hello in hellos.items():
        store.delete(f"{key}/hello/{joiner}")
        answer = {
            "token": hello["token"],
            "nonce": meeting.nonce,
            "id": meeting.unique_id.hex(),
            "wrong": wrong,
        }
        store.set(f"{key}/answer/{joiner}", json.dumps(answer))
    if wrong:
        raise RendezvousError(wrong)
    return meeting


def _join(
    store: Store, key: str, process: int, root: int, deadline: float, timeout: float, terms: str
) -> Meeting:
    token = uuid.uuid4().hex
    hello_key, answer_key = f"{key}/hello/{process}", f"{key}/answer/{process}"
    store.set(hello_key, json.dumps({"token": token, "terms": terms}))
    try:
        while (remaining := deadline - time.monotonic()) > 0:
            answer = json.loads(store.get(answer_key, remaining))
            if answer["token"] == token:
                break
            time.sleep(_RETRY)
        else:
            raise RendezvousError(
                f"found only an earlier attempt's answer for {key!r} in {timeout:g} s"
            )
    except RendezvousError as error:
        store.delete(hello_key)  # or a later attempt would take this one for present
        raise RendezvousError(
            f"process {root}, which owns the first device of {key!r}, did not create it in "
            f"{timeout:g} s: {error}"
        ) from error
    store.delete(answer_key)
    if answer["wrong"]:
        raise RendezvousError(answer["wrong"])
    return Meeting(answer["nonce"], bytes.fromhex(answer["id"]))
