"""Deferred tables: the trajectory of a dense optimizer at the cost of the rows touched.

closed_form     k optimizer steps with zero gradient, in closed form
table           the table, whose rows are caught up when they are read
zero_gradient   what an optimizer does to a row without a gradient, found while it runs
step            a step of an optimizer with deferred tables
deferred        `deferred`, `to_deferred`, `from_deferred`
"""
