"""Training steps compiled from shapes alone, and what their compiled programs say.

    step = Step(jmask.adam(), row=(16,), lookups=512)
    compiled = step.compile(10**7)              for a table (10**7, 16), not allocated
    compiled.memory_analysis()                  aliased and temporary bytes
    whole_table_operations(compiled, 10**7 * 16)    opcodes that make such an array

A step looks rows up in a table that lies beside a dense parameter, differentiates,
updates, and donates parameters and state.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

import jmask

# What may produce an array as large as a table in a program that works in place: names
# for a buffer that exists, the loop and fusion that a scatter becomes, the scatter, and the
# kernel of jmask that takes its place on TPUs.
IN_PLACE = frozenset(
    "bitcast call conditional dynamic-update-slice fusion get-tuple-element kernel parameter "
    "scatter tuple while".split()
)

_INSTRUCTION = re.compile(r" = (?P<type>.*?) (?P<opcode>[a-z][a-z0-9-]*)\(")
_GATHERED = re.compile(r" gather\((?P<table>%[\w.-]+),")
_DIMENSIONS = re.compile(r"\w+\[([\d,]*)\]")
# The sum of the rows looked up: no gradient depends on what is read.
linear = lambda params, ids: jnp.sum(params["table"][ids]) + jnp.sum(params["dense"])
# The sum of the squares of the rows looked up, each times the dense parameter.
squares = lambda params, ids: jnp.sum(jnp.square(params["table"][ids] * params["dense"][None]))


def squares_of_lines(params, ids, D):
    """`squares` of rows of a packed table."""
    rows = jmask.embedding_lookup(params["table"], ids, width=D)
    return jnp.sum(jnp.square(rows * params["dense"][None]))


def squares_of_bags(params, ids):
    """`squares` of bags of four ids."""
    bags = jmask.embedding_bag(params["table"], ids.reshape(-1, 4))
    return jnp.sum(jnp.square(bags * params["dense"][None]))


def squares_of_several_lookups(params, ids):
    """`squares` of three lookups of the same table."""
    taken = {**params, "table": jnp.take(params["table"], ids, axis=0)}
    again = squares(taken, jnp.arange(0, ids.size, 2))
    return squares(params, ids) + squares(params, ids[::-1] // 2) + again


def squares_of_casts(params, ids):
    """`squares` in mixed precision, of the table and a row of padding."""
    table = jnp.pad(params["table"].astype(jnp.bfloat16), ((1, 0), (0, 0)))
    rows = table[ids].astype(jnp.float32)
    return jnp.sum(jnp.square(rows * params["dense"][None]))


def squares_in_scan(params, ids):
    """`squares` with the ids looked up in four chunks, one after the other."""
    body = lambda total, chunk: (total + squares(params, chunk), None)
    return jax.lax.scan(body, jnp.float32(0), ids.reshape(4, -1))[0]


def with_optax(tx, grads, state, params, **extra):
    """One step of the optimizer, applied by optax."""
    updates, state = tx.update(grads, state, params, **extra)
    return optax.apply_updates(params, updates), state


def rounded_stochastically(tx, grads, state, params):
    """One step whose result is rounded to the parameters' dtype at random."""
    return jmask.apply_gradients(tx, grads, state, params, key=jax.random.key(0))


def training_step(loss, tx, apply=jmask.apply_gradients, with_value=True):
    """A jitted step, (params, state, *batch) -> (params, state, value); both are donated."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, *batch):
        if not with_value:
            return apply(tx, jmask.grad(loss)(params, *batch), state, params)
        value, gradient = jmask.value_and_grad(loss)(params, *batch)
        return *apply(tx, gradient, state, params), value

    return step


def shapes(tree, sharding=None):
    """The shapes of arrays or shapes, all placed alike."""
    placed = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(placed, tree)


def compiled_step(loss, tx, params, *batch, sharding=None, **how):
    """Such a step compiled for these arrays or shapes, on the sharding's device."""
    arguments = params, jax.eval_shape(tx.init, params), *batch
    arguments = arguments if sharding is None else shapes(arguments, sharding)
    return training_step(loss, tx, **how).lower(*arguments).compile()


@dataclasses.dataclass(frozen=True)
class Step:
    """A training step, up to the number of rows of its table.

    Attributes:
        tx: the optimizer.
        row: the shape of a row.
        dtype: of the parameters.
        lookups: ids in a batch.
        loss: (params, ids) -> scalar.
        apply: (tx, grads, state, params) -> (params, state).
        value_and_grad: what differentiates the loss.
        table: an array as another table.
    """

    tx: optax.GradientTransformation
    row: tuple[int, ...] = (16,)
    dtype: Any = jnp.float32
    lookups: int = 512
    loss: Callable[..., jax.Array] = squares
    apply: Callable[..., tuple[Any, Any]] = with_optax
    value_and_grad: Callable[..., Any] = jmask.value_and_grad
    table: Callable[[Any], Any] = lambda x: x

    def __call__(self, params, state, ids):
        value, grads = self.value_and_grad(self.loss)(params, ids)
        params, state = self.apply(self.tx, grads, state, params)
        return params, state, value

    def arguments(self, rows, sharding=None):
        """The shapes of (params, state, ids) for a table of `rows` rows."""
        table = jax.ShapeDtypeStruct((rows, *self.row), self.dtype)
        params = {
            "dense": jax.ShapeDtypeStruct(self.row, self.dtype),
            "table": jax.eval_shape(self.table, table),
        }
        state = jax.eval_shape(self.tx.init, params)
        ids = jax.ShapeDtypeStruct((self.lookups,), jnp.int32)
        return shapes((params, state, ids), sharding)

    def jitted(self, donate=True):
        """The step under jit, parameters and state donated."""
        # A new function every time, so that no two share a cache of traces.
        step = lambda params, state, ids: self(params, state, ids)
        return jax.jit(step, donate_argnums=(0, 1) if donate else ())

    def compile(self, rows, sharding=None, donate=True):
        """The step compiled for a table of `rows` rows, on the sharding's device."""
        return self.jitted(donate).lower(*self.arguments(rows, sharding)).compile()

    def entries(self, rows):
        """The number of entries of a table of `rows` rows."""
        return rows * math.prod(self.row)

    def table_bytes(self, rows):
        """Bytes of the table and of all state arrays of its shape."""
        params, state, _ = self.arguments(rows)
        shapes = [x.shape for x in jax.tree.leaves(params["table"])]
        arrays = [x for x in jax.tree.leaves((params, state)) if x.shape in shapes]
        return sum(x.size * x.dtype.itemsize for x in arrays)

    def batch_bytes(self):
        """Bytes of the rows looked up, in float32."""
        return self.entries(self.lookups) * 4


def temporary_bytes(compiled, aliased=0, entries=None, allowed=IN_PLACE):
    """The temporary bytes of a program that works in place.

    Args:
        aliased: so many bytes of arguments, or more, share their buffer with a result.
        entries: of no other array there are so many, or more.
    """
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= aliased
    assert entries is None or whole_table_operations(compiled, entries) <= allowed
    return memory.temp_size_in_bytes


class DeferredStep(Step):
    """A step of `jmask.deferred`, which catches the rows of its batch up before."""

    def __call__(self, params, state, ids):
        params, state = self.tx.catch_up(params, state, {"table": ids})
        return super().__call__(params, state, ids)


def check_deferred_in_place(inner, sharding=None):
    """A deferred step needs temporaries of the batch and of its lines, some thousand rows."""
    step = DeferredStep(jmask.deferred(inner), (128,), apply=jmask.apply_gradients)
    small, large = (
        temporary_bytes(step.compile(n, sharding), step.table_bytes(n), step.entries(n))
        for n in (10**6, 4 * 10**6)
    )
    assert large <= min(40 * step.batch_bytes() + 2**24, 2 * small + 2**20)


def vocabulary_in_place(capacity, sharding=None, keys=1024, **policy):
    """Finding the rows of keys, compiled: lines are aliased, all else is of the batch."""
    vocab = jax.eval_shape(lambda: jmask.vocabulary.create(capacity, **policy))
    words = jax.ShapeDtypeStruct((keys, 2), jnp.uint32)
    arguments = shapes((vocab, words), sharding)
    compiled = jax.jit(jmask.vocabulary.rows_of, donate_argnums=0).lower(*arguments).compile()
    temporary = temporary_bytes(compiled, 4 * vocab.lines.size, vocab.lines.size)
    assert temporary < 10**5 + 24 * vocab.lines.shape[1] * keys  # six times the lines
    return compiled


def check_that_tables_are_seen(step, sharding, rows=10**6):
    """A control: a dense step makes tables, and without donation a step copies them."""
    stock = Step(optax.adam(1e-3), row=step.row, value_and_grad=jax.value_and_grad)
    for control, donate in ((stock, True), (step, False)):
        compiled = control.compile(rows, sharding, donate)
        assert not whole_table_operations(compiled, control.entries(rows)) <= IN_PLACE
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def whole_table_operations(compiled, entries):
    """Opcodes of all instructions that produce an array of `entries` entries or more.

    Not of those that a fusion gathers rows of: it computes these rows alone.
    """
    lines = compiled.as_text().splitlines()
    gathered = _gathered_in_fusions(lines)
    opcodes = set()
    for line in lines:
        instruction = _INSTRUCTION.search(line)
        if instruction is None or line.split(" = ")[0].strip() in gathered:
            continue
        for dimensions in _DIMENSIONS.findall(instruction["type"]):
            if math.prod(int(size) for size in dimensions.split(",") if size) >= entries:
                is_kernel = '"tpu_custom_call"' in line
                opcodes.add("kernel" if is_kernel else instruction["opcode"])
    return opcodes


def _gathered_in_fusions(lines):
    """The names of what fusions gather rows of."""
    gathered, is_fused = set(), False
    for line in lines:
        if line.startswith(("%", "ENTRY")):
            is_fused = line.startswith("%fused_computation")
        elif is_fused and (found := _GATHERED.search(line)):
            gathered.add(found["table"])
    return gathered


def described(needs, **how):
    """The devices of a topology that is only described; `needs` is said where it cannot be."""
    try:
        return topologies.get_topology_desc(**how).devices
    except Exception as error:
        pytest.fail(f"this cannot be described: {how}; {needs}: {error}", pytrace=False)


def rounds_of_loops(compiled):
    """How many times each loop of a program runs; 0 where that is not known."""
    loops = [line for line in compiled.as_text().splitlines() if " while(" in line]
    known = [re.search(r'"known_trip_count":\{"n":"(\d+)"', line) for line in loops]
    return [int(rounds[1]) if rounds else 0 for rounds in known]


_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)')
_SCOPED = re.compile(r'"used_scoped_memory_configs":\[\{[^]]*?"size":"(\d+)"')


def costed_cycles(compiled):
    """The cycles of all instructions of a TPU program for which its compiler says them."""
    return sum(int(cycles) for cycles in _CYCLES.findall(compiled.as_text()))


def streaming_scatters(compiled, entries):
    """The scatters of a TPU program that move an array of `entries` entries as a whole.

    Where a scatter moves window after window of its operand, the windows fill the memory of
    the core: 16 MB on a v5e and v5p, 32 MB on a v6e, where one that moves rows takes .4 MB.
    """
    found = []
    for line in compiled.as_text().splitlines():
        instruction, scoped = _INSTRUCTION.search(line), _SCOPED.search(line)
        if instruction is None or scoped is None or "scatter" not in line:
            continue
        sizes = [
            math.prod(int(size) for size in dimensions.split(",") if size)
            for dimensions in _DIMENSIONS.findall(instruction["type"])
        ]
        if max(sizes, default=0) >= entries and int(scoped[1]) > 2**22:
            found.append(line.split(" = ")[0].strip())
    return found
