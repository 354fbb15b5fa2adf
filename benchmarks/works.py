"""What is measured: one table of works, each of ours beside one or more of theirs.

    Task()                            jmask: a step of Adam, V = 10^6, D = 64, n = 8,192 uniform
    Task("torch")                     torch on the same work
    Task(rows=10_000_000)             jmask on ten times the rows
    Comparison(ours, theirs)          these in alternating rounds

V is the number of rows of the table, D the numbers in a row, n the lookups in a batch. All of
V x D x n x ids x optimizers would take hours: the matrix moves one of them at a time away from
`Task()`, which shows the same slopes. The update alone is of rows that are unique, so that
Zipf ids are in the steps only.
"""

from dataclasses import dataclass, fields, replace

from programs import PROGRAMS

OPTIMIZERS = ("SGD", "momentum", "Adagrad", "row-wise Adagrad", "Adam")

# Who offers what with row-sparse gradients, in their own names; optax does it densely.
OFFERS: dict[str, dict[str, str]] = {
    "torch": {"SGD": "SGD", "Adagrad": "Adagrad", "Adam": "SparseAdam"},
    "FBGEMM": {
        "SGD": "EXACT_SGD",
        "Adagrad": "EXACT_ADAGRAD",
        "row-wise Adagrad": "EXACT_ROWWISE_ADAGRAD",
    },
    "TensorFlow": {
        "SGD": "scatter_sub",
        "momentum": "KerasMomentum",
        "Adagrad": "AdagradV2",
        "Adam": "lazy Adam",
    },
    "MXNet": {
        "SGD": "sgd",
        "momentum": "sgd, momentum",
        "Adagrad": "adagrad",
        "row-wise Adagrad": "groupadagrad",
        "Adam": "adam",
    },
    "optax": dict.fromkeys(("SGD", "momentum", "Adagrad", "Adam"), "dense"),
    "C loop": dict.fromkeys(OPTIMIZERS, ""),
    "memory copy": dict.fromkeys(OPTIMIZERS, ""),
    "JAX": {"Adam": ""},
    "einsum": {"Adam": ""},
}
_PEERS = ("torch", "FBGEMM", "TensorFlow", "MXNet")
_LIMITS = ("C loop", "memory copy")

# "step" is lookup, loss, backward and update, with the value of the loss; "update" is the
# update alone of unique rows, with a gradient that is given. A "deferred step" is one of
# `jmask.deferred`, which catches the rows of its batch up before; a "step on files" one of
# `jmask.host`, whose table and slots are files.
_TITLES = {
    "dispatch": "100 calls of a jitted step, no arithmetic",
    "small step": "100 jitted steps of a table of 8 x 4",
    "eager": "100 updates outside jit, a table of 8 x 4",
    "tracing": "tracing value_and_grad, 50 layers and 20 tables",
    "compiling": "compiling five programs with Adam",
}
_IN_WORDS = {"bags": "bags", "DLRM": "DLRM, whole step"}
_OTHER_WORK = {
    "deferred step": "without `deferred`",
    "plain bags": "by `embedding_bag`",
    "step on files": "in memory",
}


@dataclass(frozen=True)
class Task:
    """Who does what on which ids.

    `ids` is one of "uniform", "Zipf" and "unique". `without` names a way around what XLA does
    slowly, of `tricks.py`, that is left out.
    """

    who: str = "jmask"
    work: str = "step"
    optimizer: str = "Adam"
    rows: int = 1_000_000
    width: int = 64
    lookups: int = 8192
    ids: str = "uniform"
    without: str = ""
    tables: int = 1
    bags: int = 0


@dataclass(frozen=True)
class Comparison:
    """Ours beside theirs, in so many rounds."""

    ours: Task
    theirs: tuple[Task, ...]
    rounds: int

    @property
    def is_large(self) -> bool:
        """Whether Adam needs most of 10 GB."""
        return any(task.rows * task.width > 2**29 for task in (self.ours, *self.theirs))


REFERENCE = Task()
_UPDATE = Task(work="update", ids="unique")
_DENSE = Task(rows=10_000, ids="unique")
_DISPATCH, _SMALL_STEP, _EAGER = (
    Task(work=work, rows=8, width=4, lookups=4) for work in ("dispatch", "small step", "eager")
)
_TRACING = Task(work="tracing")
_COMPILING = Task(work="compiling", width=32)
_MANY = Task(lookups=100_000)
# With the trajectory of the dense optimizer.
_DEFERRED = Task(work="deferred step")
# Rows of n-grams; those of a table of 10^8 rows are on pages of their own.
_IN_MEMORY = Task(optimizer="Adagrad", width=16)
_ON_FILES = replace(_IN_MEMORY, work="step on files", rows=100_000_000)
# 20,480 bags of 5; and bags of 1 to 10 for each of 2,048 examples, as in DLRM's own generator.
BAGS = Task(work="bags", lookups=102_400, bags=20_480)
# The same as `table[ids].sum(1)`.
_PLAIN_BAGS = replace(BAGS, work="plain bags")
# Of 32, with weights that have a gradient; beside the einsum of rows and weights.
_WEIGHTED = [
    Task(work="weighted bags", width=width, lookups=32_768, bags=1024) for width in (16, 64)
]
_TABLES = Task(work="bags", rows=50_000, lookups=26 * 2048 * 11 // 2, tables=26, bags=2048)
DLRM = replace(_TABLES, work="DLRM")
# SGD, Adagrad, row-wise Adagrad, Adam.
_GOALS_OF_BAGS = {
    BAGS: (0.6, 0.35, 0.35, 0.35),
    _TABLES: (0.5, 0.25, 0.25, 0.25),
    DLRM: (0.7, 0.55, 0.55, 0.55),
    replace(_MANY, lookups=102_400): (0.7, 0.35, 0.4, 0.35),
}
# Models as one writes them down, of so many examples and numbers in a row.
_PROGRAMS = [
    Task(work=name, width=width, lookups=examples * PROGRAMS[name].entries)
    for name, examples, width in (
        ("factorization machine", 4096, 16),
        ("skip-gram", 4096, 64),
        ("BPR", 8192, 64),
        ("TransE", 4096, 64),
        ("mean of words", 1024, 64),
    )
]
_FOUR = ("SGD", "Adagrad", "row-wise Adagrad", "Adam")

# Ours / theirs that the project wants to reach; `Task` in a figure is exactly this work.
GOALS: dict[tuple[Task, Task], float] = {
    (ours, replace(ours, **of_theirs)): goal
    for ours, of_theirs, goal in (
        (Task(), {"who": "torch"}, 0.35),
        (Task(optimizer="Adagrad"), {"who": "torch"}, 0.45),
        (Task(optimizer="SGD"), {"who": "torch"}, 0.6),
        (Task(optimizer="Adagrad"), {"who": "FBGEMM"}, 0.5),
        (Task(optimizer="row-wise Adagrad"), {"who": "FBGEMM"}, 0.3),
        (Task(), {"who": "MXNet"}, 0.25),
        (_UPDATE, {"who": "MXNet"}, 0.6),
        (_UPDATE, {"who": "C loop"}, 1.3),
        (replace(_UPDATE, optimizer="Adagrad"), {"who": "C loop"}, 1.3),
        (replace(_UPDATE, optimizer="momentum"), {"who": "C loop"}, 1.3),
        (_DENSE, {"who": "optax"}, 1.05),
        (Task(rows=10_000_000), {"rows": 1_000_000}, 1.3),
        (Task(ids="Zipf"), {"ids": "uniform"}, 1.1),
        (_DEFERRED, {"work": "step"}, 1.3),
        (_DEFERRED, {"who": "optax", "work": "step"}, 0.1),
        (_ON_FILES, {"work": "step", "rows": 1_000_000}, 1.3),
        (_DISPATCH, {"who": "optax"}, 1.0),
        (_TRACING, {"who": "JAX"}, 1.5),
        *((task, {"who": "einsum"}, 1.0) for task in _WEIGHTED),
        *(
            (replace(task, optimizer=optimizer), {"who": who}, goal)
            for task, goals in _GOALS_OF_BAGS.items()
            for optimizer, goal in zip(_FOUR, goals, strict=True)
            for who in ("torch", "FBGEMM")
            if optimizer in OFFERS[who]
        ),
    )
}


def comparisons(quick: bool, rounds: int) -> list[Comparison]:
    """Everything that is measured, in order."""
    fewer = max(rounds // 3, 3)
    steps = [_beside(Task(optimizer=o), _PEERS, rounds) for o in OPTIMIZERS]
    # Apart from the others: a pass over the whole table empties every cache.
    dense = [
        _beside(Task(optimizer=o), ("optax",), fewer)
        for o in (("Adam",) if quick else OFFERS["optax"])
    ]
    updates = [
        _beside(
            replace(_UPDATE, optimizer=o), (*_LIMITS, "torch", "TensorFlow", "MXNet"), rounds
        )
        for o in OPTIMIZERS
    ]
    hot_rows = [
        _beside(Task(optimizer=o, ids="Zipf"), _PEERS, rounds, Task(optimizer=o))
        for o in (("Adam",) if quick else OPTIMIZERS)
    ]
    against_rows = [
        _beside(Task(rows=rows), (*_PEERS, "optax"), rounds, REFERENCE)
        for rows in (10_000, 100_000)
    ]
    against_lookups = [
        _beside(Task(lookups=lookups), _PEERS, rounds, REFERENCE)
        for lookups in ((1_000,) if quick else (1_000, 100_000))
    ]
    overhead = [_beside(x, ("optax",), rounds) for x in (_DISPATCH, _SMALL_STEP, _EAGER)]
    overhead.append(_beside(_TRACING, ("JAX",), rounds))
    overhead.append(_beside(_COMPILING, ("optax",), fewer))
    found = [*steps, *dense, _beside(_DENSE, ("optax",), rounds), *updates, *hot_rows]
    found += [*against_rows, *against_lookups, *_bags(quick, fewer)]
    found += [*_programs(fewer), *_deferred(fewer), *_tricks(rounds), *overhead]
    smaller = replace(_ON_FILES, rows=1_000_000)
    found.append(Comparison(_ON_FILES, (_IN_MEMORY, smaller), rounds))
    if quick:
        return found
    # Adam on 10^7 rows of 64 is 7.7 GB: one of them at a time, beside our step on 10^6 rows.
    largest = Task(rows=10_000_000)
    found.append(Comparison(largest, (REFERENCE,), rounds))
    found.append(Comparison(REFERENCE, (replace(largest, who="torch"),), rounds))
    # What the machine itself takes more for rows of a larger table.
    in_c = [replace(_UPDATE, who="C loop", rows=rows) for rows in (10_000_000, 1_000_000)]
    found.append(Comparison(replace(_UPDATE, rows=10_000_000), (_UPDATE, *in_c), rounds))
    done = {comparison.ours for comparison in found}
    return found + [c for c in _matrix(fewer) if c.theirs and c.ours not in done]


def _bags(quick: bool, rounds: int) -> list[Comparison]:
    tasks = [BAGS, _TABLES] if quick else list(_GOALS_OF_BAGS)
    weighted = [_beside(task, ("einsum",), rounds) for task in _WEIGHTED]
    plain = [
        Comparison(replace(_PLAIN_BAGS, optimizer=o), (replace(BAGS, optimizer=o),), rounds)
        for o in ("SGD", "Adagrad", "Adam")
    ]
    return [*weighted, *plain] + [
        _beside(replace(task, optimizer=optimizer), ("torch", "FBGEMM"), rounds)
        for task in tasks
        for optimizer in _FOUR
    ]


def _programs(rounds: int) -> list[Comparison]:
    return [
        _beside(replace(task, optimizer=optimizer), ("torch",), rounds)
        for task in _PROGRAMS
        for optimizer in OFFERS["torch"]
    ]


def _deferred(rounds: int) -> list[Comparison]:
    """Beside the lazy step, and beside the dense one, whose trajectory it has."""
    found = []
    for ids in ("uniform", "Zipf"):
        ours, lazy = replace(_DEFERRED, ids=ids), Task(ids=ids)
        found.append(Comparison(ours, (lazy,), 3 * rounds))
        found.append(Comparison(ours, (replace(lazy, who="optax"),), rounds))
    return found


def _tricks(rounds: int) -> list[Comparison]:
    """What each way around XLA gains."""
    found = []
    for ours, names in (
        (REFERENCE, ("fast gather",)),
        (_MANY, ("fast gather",)),
        (Task(width=32), ("fast gather",)),
        (REFERENCE, ("hashed ids",)),
        (replace(REFERENCE, optimizer="row-wise Adagrad"), ("hashed ids",)),
        (
            Task("jmask", "factorization machine", optimizer="Adam", width=16, lookups=159_744),
            ("hashed ids",),
        ),
        (Task(rows=1_000), ("whole small tables",)),
        (_DENSE, ("whole small tables",)),
        (BAGS, ("gathered gradients", "bags in blocks", "bags by column")),
        (_TABLES, ("gathered gradients", "bags in blocks", "tables side by side")),
    ):
        theirs = tuple(replace(ours, without=name) for name in names)
        found.append(Comparison(ours, theirs, rounds))
    return found


def _matrix(rounds: int) -> list[Comparison]:
    moves: list[dict[str, int]] = [
        {"width": 16},
        {"width": 128},
        {"rows": 10_000},
        {"rows": 100_000},
        {"rows": 10_000_000, "width": 16},
        {"lookups": 1_000},
        {"lookups": 100_000},
    ]
    found = []
    for optimizer in OPTIMIZERS:
        for move in moves:
            # Not all of them at once where tables are large.
            peers = _PEERS[:2] if move.get("rows") == 10_000_000 else _PEERS
            found.append(_beside(Task(optimizer=optimizer, **move), peers, rounds))
            update = replace(_UPDATE, optimizer=optimizer, **move)
            found.append(_beside(update, ("C loop",), rounds))
    return found


def _beside(ours: Task, peers: tuple[str, ...], rounds: int, *more: Task) -> Comparison:
    theirs = [replace(ours, who=peer) for peer in peers if ours.optimizer in OFFERS[peer]]
    return Comparison(ours, (*more, *theirs), rounds)


def title(task: Task) -> str:
    """What is done: "step, Adam, V = 10,000"."""
    if task.work in _TITLES:
        return _TITLES[task.work]
    usual = _UPDATE if task.work == "update" else REFERENCE
    work = _IN_WORDS.get(task.work, task.work)
    return ", ".join([work, task.optimizer, *_differences(task, usual)])


def opponent(theirs: Task, ours: Task) -> str:
    """Who does it, and what of it is not as in `ours`: "jmask, uniform ids"."""
    name = f"{theirs.who} {OFFERS.get(theirs.who, {}).get(theirs.optimizer, '')}".strip()
    is_same = theirs.work == ours.work
    work = [] if is_same else [f"{theirs.work} {_OTHER_WORK[ours.work]}"]
    return ", ".join([name, *work, *_differences(theirs, ours)])


def _differences(task: Task, usual: Task) -> list[str]:
    symbols = {
        "rows": "V = {:,}",
        "width": "D = {}",
        "lookups": "n = {:,}",
        "ids": "{} ids",
        "without": "without {}",
        "tables": "{} tables",
        "bags": "{:,} bags",
    }
    return [
        symbols[field.name].format(getattr(task, field.name))
        for field in fields(Task)
        if field.name in symbols and getattr(task, field.name) != getattr(usual, field.name)
    ]
