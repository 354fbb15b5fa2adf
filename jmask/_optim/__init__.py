"""The optimizers by name, what is wrapped around them, and `explain`.

row_rule                    an optimizer as arithmetic on a row; hyperparameters, checked
named, adam                 the optimizers by name
ema                         averages of parameters
touched                     the rows that have moved since a step
microbatches                `multi_steps`: one step for the gradients of k microbatches
guards                      steps that are not taken, rows left out, bounds on norms of rows
sparsecore                  rules as SparseCore takes them: `jmask.sparsecore`
torch_state                 states to and from torch
exported                    steps as files, by `jax.export`
explain                     what a step does to each parameter, from shapes
"""
