"""Thresholds between two ways to compute the same, each with the measurement behind it.

`benchmarks/tricks.py` times steps with and without the first way where a line names it. Tests
draw these at random, so that every way is taken at small sizes. Unless a line says otherwise,
times were taken on two CPU cores with jaxlib 0.10.0 to 0.12.0, and change little between these.
"""

import os

# --- gathers on CPUs ("fast gather") ----------------------------------------------------------

# Widths of rows whose copying loops LLVM unrolls before it vectorizes: rows of 32 to 64 entries
# take two to four times as long as they have to.
UNROLLED_WIDTHS = range(32, 65)
# A loop with more operations than these on the entries of a row is not unrolled. A copy has 5.
UNROLLED_OPERATIONS, COPY_OPERATIONS = 416, 5
# Bytes of an entry for which that was seen: float32, bfloat16, float16.
UNROLLED_BYTES = (2, 4)

# --- loops over blocks of rows ----------------------------------------------------------------

# Bytes of the rows of a block, and the least and most rows: enough to be worth the overhead of
# each operation, 5 to 20 us, and few enough for second-level caches.
BLOCK_BYTES = 2**23
BLOCK_ROWS = 256, 4096


def block_size(bytes_of_row: int) -> int:
    """Return how many rows a block has."""
    least, most = BLOCK_ROWS
    return min(max(BLOCK_BYTES // max(bytes_of_row, 1), least), most)


# Loops of several tables that run side by side in one: as many as there are cores, over which
# XLA spreads the operations of a body.
LOOPS_TOGETHER = min(max(os.cpu_count() or 1, 4), 32)

# --- equal ids --------------------------------------------------------------------------------

# Buckets of a CPU's hash table for each id ("hashed ids"): of four, one id in eight takes a
# second round.
HASH_BUCKETS = 4
# Bytes of rows from which a TPU does not sum rows of equal ids by one scatter of all: by the
# estimates for a v5e (libtpu 0.0.50) 5 ns a row in a batch of 4 MB are 15 in one of 32 MB.
LARGE_SUMS = 2**24
# Rows of ids that come again that are then added in one round of a loop, and rounds in which
# that would be all rows. A row takes 25 ns in rounds of 2048, and 57 in rounds of 256.
LATER_ROWS, LATER_ROUNDS = 256, 32

# --- scatters on TPUs -------------------------------------------------------------------------

# Rows of the table for each id up to which a scatter is promised sorted ids. With the promise
# it moves the whole table, without it the rows. By the compiler's schedules (libtpu 0.0.50) the
# two are level at 35 (v5e) to 76 (v6e).
SORTED_PAYS = 35

# --- tables updated densely ("whole small tables") --------------------------------------------

# Rows of the table for each lookup up to which the whole table is updated: no sort, all cores.
DENSE_ROWS_FOR_EACH_LOOKUP = 1.5

# --- gathered rows ----------------------------------------------------------------------------

# Entries for each row of the source from which gathered rows are worth keeping apart.
REPEATS = 2
# Bytes of rows up to which they are materialised though they are summed, or repeat. Below, a
# loop gains nothing: one for each of 26 tables of 0.5 MB makes a step 1.3 times as long. With
# rows of 3 to 26 MB a step of materialised ones takes 1.4 to 3.2 times as long; after
# `keep_memory` 1.25 times with 26 tables, and on one table 1.35 with SGD and 0.9 with Adam
# ("gathered gradients").
SMALL_ROWS = 2**21

# Length of bags up to which rows are added column by column ("bags by column"), in one loop on
# all cores: twice as fast as by blocks from 64 numbers in a row on, and 7 to 18 % of a step. A
# column takes 2.5 ms to compile.
COLUMNS = 64

# --- tables computed on before they are looked up ---------------------------------------------

# Equations up to which a lookup in an array made of tables is read through them: what is used
# twice in each of n steps has 2^n. A judgement: 256 are traced in 0.1 s.
VIEW_EQUATIONS = 256

# --- several devices -----------------------------------------------------------------------

# Ids from which rows of a sharded table go to their owners alone. Fewer are all-gathered,
# which needs no sort. On eight devices of a CPU 4,096 ids take as long in either way; by an
# all-gather 8,192 take twice as long and 65,536 four times.
EXCHANGED_IDS = 2**13
