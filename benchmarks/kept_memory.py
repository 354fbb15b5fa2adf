"""What `jmask.keep_memory` gains, and bags that are written by hand beside `embedding_bag`.

    python benchmarks/kept_memory.py

Steps of a table of 10^6 rows of 64. Each runs in two processes that take turns, one of which
called `keep_memory` first: what glibc keeps is a matter of a process. Times are medians, in
milliseconds.
"""

import itertools
from dataclasses import replace

import numpy as np
from cores import seconds_of_steps
from other_interpreter import Interpreter
from rich.console import Console
from rich.table import Table
from works import BAGS, Task, title

WORKS = (
    Task(work="skip-gram", lookups=49_152),
    Task(lookups=100_000),
    replace(BAGS, work="plain bags"),
    BAGS,
)
ROUNDS = 8


def main() -> None:
    table = Table("step", "as it is", "kept", "kept ÷ as it is")
    for work, optimizer in itertools.product(WORKS, ("SGD", "Adagrad", "Adam")):
        task = replace(work, optimizer=optimizer)
        ways = [
            Interpreter(None, "jmask_worker.py", arguments=arguments)
            for arguments in (["--as-it-is"], [])
        ]
        before, after = seconds_of_steps(task, ways, ROUNDS)
        numbers = 1e3 * np.median(before), 1e3 * np.median(after), np.median(after / before)
        table.add_row(title(task), *(f"{x:.3g}" for x in numbers))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
