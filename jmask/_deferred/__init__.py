"""Deferred rows: the trajectory of a dense optimizer at the cost of the rows touched.

missed_steps    k optimizer steps with zero gradient, from coefficients that all rows share
measured        what an optimizer does to a row without a gradient, by giving it such rows
deferred        `deferred`: the transformation, its state, and `catch_up`
"""
