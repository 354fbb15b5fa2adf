"""A training run with checkpoints, to be killed: python training_to_kill.py FOLDER STEPS

Goes on from the last checkpoint in FOLDER, prints each step, and at the end the parameters.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import jmask

V, D = 300, 8
TX = jmask.skip_nonfinite(jmask.adam(0.05))


@jax.jit
def train_step(params, state, number):
    ids = jax.random.randint(jax.random.key(number), (64,), 0, V)
    loss = lambda params: jnp.sum(jnp.sin(params["t"][ids] @ params["w"]))
    return jmask.apply_gradients(TX, jmask.grad(loss)(params), state, params)


def main(folder: str, steps: int) -> None:
    import orbax.checkpoint as ocp

    params = {"t": jax.random.normal(jax.random.key(0), (V, D)), "w": jnp.ones(D)}
    training = {"params": params, "state": TX.init(params)}
    options = ocp.CheckpointManagerOptions(save_interval_steps=5, max_to_keep=2)
    with ocp.CheckpointManager(folder, options=options) as manager:
        start = 0
        if manager.latest_step() is not None:
            last = manager.latest_step()
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, training)
            training = manager.restore(last, args=ocp.args.StandardRestore(like))
            start = last + 1
        for number in range(start, steps):
            params, state = train_step(training["params"], training["state"], number)
            training = {"params": params, "state": state}
            manager.save(number, args=ocp.args.StandardSave(training))
            print("step", number, flush=True)
    for leaf in jax.tree.leaves(training):
        print(np.asarray(leaf).tobytes().hex())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
