"""Rows of a table for keys that are not known beforehand: an open vocabulary.

    vocab = create(capacity=1_000_000)                 table (vocab.table_rows, D)
    rows, vocab, recycled = rows_of(vocab, keys)       in the jitted step, vocab donated
    params, state = reset(tx, params, state, {"table": recycled}, init)

A key gets a row of its own once it was seen `admit_after` times, in place of the key of its set
that was used longest ago; up to then it shares a row with others. Everything is arrays: it runs
under jit and scan, is exported, saved and sharded as they are.
"""

from jmask._vocabulary.keys import hash_strings as hash_strings
from jmask._vocabulary.keys import words_of as words_of
from jmask._vocabulary.reset import reset as reset
from jmask._vocabulary.rows_of import rows_of as rows_of
from jmask._vocabulary.vocabulary import Vocabulary as Vocabulary
from jmask._vocabulary.vocabulary import create as create
