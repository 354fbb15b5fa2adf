"""Tables in host memory or on disk: a step sees the rows of its batch.

    host = jmask.host.offload({"table": np.memmap(...), "w": w}, tx)
    for batch, params, state in host.steps(loader, ids={"table": lambda batch: batch["ids"]}):
        params, state, loss = train_step(params, state, batch)
        host.commit(params, state)
    host.flush()

    batch k       ids [7, 9, 7]     params["table"] has rows 7, 9     ids become [0, 1, 0]
    batch k + 1   ids [9, 4]        row 4 is read while step k runs; 9 is what step k made of it

Everything else is as it is with tables on the device: the step, the optimizer, the trajectory.
"""

from jmask._host.offload import Offloaded as Offloaded
from jmask._host.offload import offload as offload
