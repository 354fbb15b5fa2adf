"""The optimizers by name, what is wrapped around them, and `explain`.

row_rule                    an optimizer as arithmetic on a row
hyperparameters             what they are given, checked
sgd, adam, adagrad, ftrl    the rules
multi_steps, conditional_step, drop_rows, row_norms     microbatches; steps not taken; bounds
deferred                    tables with the dense trajectory at the cost of the rows touched
torch_state                 states to and from torch
exported                    steps as files, by `jax.export`
explain                     what a step does to each parameter, from shapes
"""
