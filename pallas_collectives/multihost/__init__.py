"""Agreement and data movement between processes.

Every function here is collective: all processes of the program call the same ones in the same
order. Before anything moves, they agree over JAX's coordination service that all are there and
mean the same thing; so a process that is missing or that disagrees becomes an error that names
it, on every process, and not a hang.

One thread of a process calls them, `barrier` excepted. Process 0 is home to the coordination
service: when it dies, JAX ends the others.
"""

from pallas_collectives.multihost.arrays import (
    global_array_to_host_local_array as global_array_to_host_local_array,
)
from pallas_collectives.multihost.arrays import (
    host_local_array_to_global_array as host_local_array_to_global_array,
)
from pallas_collectives.multihost.equality import assert_equal as assert_equal
from pallas_collectives.multihost.errors import ProcessError as ProcessError
from pallas_collectives.multihost.errors import ProcessFailureError as ProcessFailureError
from pallas_collectives.multihost.errors import ProcessMismatchError as ProcessMismatchError
from pallas_collectives.multihost.errors import ProcessTimeoutError as ProcessTimeoutError
from pallas_collectives.multihost.liveness import live_devices as live_devices
from pallas_collectives.multihost.movement import broadcast_one_to_all as broadcast_one_to_all
from pallas_collectives.multihost.movement import process_allgather as process_allgather
from pallas_collectives.multihost.preemption import (
    reached_preemption_sync_point as reached_preemption_sync_point,
)
from pallas_collectives.multihost.synchronization import barrier as barrier
from pallas_collectives.multihost.synchronization import (
    sync_global_devices as sync_global_devices,
)
