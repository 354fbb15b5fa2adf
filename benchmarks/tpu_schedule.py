"""The time of a TPU program, estimated from the schedules that its compiler writes.

libtpu dumps the final VLIW bundles of each kernel. A bundle is issued in one cycle, so that

    time = bundles * rounds of the loops around them / clock
           + 0.4 us for each wait for a DMA that nothing hides
           + bytes of a table that is streamed as a whole / bandwidth of HBM

Where the compiler prints `estimated_cycles` of a kernel these are taken; gathers, scatters,
sorts and Pallas calls have none. The kernels of jmask copy rows in loops whose rounds depend
on the batch: they are counted for full blocks, and their waits are taken to be hidden, since
the next block is copied meanwhile. Kernels that are the same are compiled, and dumped, once:
an instruction without a dump takes as long as its twin. All numbers are estimates; their ratios
are firmer.
"""

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jmask._kernels._tpu import row_updates

# GHz and GB/s, as the Cloud TPU documentation has bandwidths; clocks as libtpu has them.
GENERATIONS = {"v5e": (1.5, 819), "v6e": (1.75, 1640), "v5p": (1.75, 2765)}
WAIT = 0.4e-6  # seconds: an assumption

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:[> ]*\{(.*)$")
_EXIT = re.compile(r"scmp\.ge\.s32\.totalorder %\w+, (\d+)( /\* loop exit test)?")
_COPY = re.compile(r"dma\.(?:hbm_to_vmem|vmem_to_hbm|hbm_to_hbm)")
_LATE = 5  # bundles of a loop after the branch back


def dump_to(folder: Path) -> None:
    """Have libtpu write schedules; call it before JAX is imported."""
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
        "--xla_jf_dump_llo_pass_label_regex=final_bundles"
    )


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The cost of one kernel of a program.

    Attributes:
        name: of its instruction.
        bundles: that are issued.
        waits: for DMAs that nothing hides.
        streams: whether it moves windows of an array, one after the other, to the end.
    """

    name: str
    bundles: int
    waits: int
    streams: bool


def kernels_of(folder: Path) -> Iterator[Kernel]:
    """The kernels whose schedules are in a folder."""
    for path in sorted(folder.glob("*final_bundles.txt")):
        if not re.search("schedule-analysis|static_gap|late-|-TLP-", path.name):
            name = re.sub(r"^\d+-|-\d+-final_bundles\.txt$", "", path.name)
            yield _kernel(name, _bundles(path))


def _bundles(path: Path) -> list[str]:
    bundles: list[str] = []
    for line in path.read_text(errors="replace").splitlines():
        if match := _BUNDLE.match(line):
            bundles.append(match[1])
        elif bundles:
            bundles[-1] += line
    return bundles


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Bundles `first` to `last`, and how many rounds there are if it is known."""

    first: int
    last: int
    rounds: int | None
    windows: int | None = None

    def __contains__(self, bundle: int) -> bool:
        return self.first <= bundle <= self.last


def _loops(bundles: list[str]) -> list[_Loop]:
    starts: dict[str, int] = {}
    for i, text in enumerate(bundles):
        for region in re.findall(r"Start region (\d+)", text):
            starts.setdefault(region, i)
    ends = {
        (starts[region], i)
        for i, text in enumerate(bundles)
        for region in re.findall(r"target = \$region(\d+)", text)
        if starts.get(region, i + 1) <= i
    }
    return [_loop(bundles, first, last) for first, last in sorted(ends)]


def _loop(bundles: list[str], first: int, branch: int) -> _Loop:
    last = min(branch + _LATE, len(bundles) - 1)
    body, tail = (" ".join(bundles[i : last + 1]) for i in (first, max(first, last - 14)))
    tests = _EXIT.findall(tail)
    known = [int(count) for count, is_exit in tests if is_exit]
    if known:
        return _Loop(first, last, known[-1])
    both_ways = "dma.hbm_to_vmem" in body and "dma.vmem_to_hbm" in body
    if tests and both_ways and last - first < 60:
        return _Loop(first, last, 0, windows=int(tests[-1][0]))
    return _Loop(first, last, None)


def _kernel(name: str, bundles: list[str]) -> Kernel:
    loops, is_own = _loops(bundles), name.startswith("jmask_")
    if is_own:
        loops = [_with_full_blocks(bundles, loop) for loop in loops]
        # The loop over the blocks has three rounds more than there are blocks.
        outer = max(range(len(loops)), key=lambda i: loops[i].last - loops[i].first)
        loops[outer] = dataclasses.replace(loops[outer], rounds=(loops[outer].rounds or 4) - 3)
    total = waits = 0
    for i, text in enumerate(bundles):
        weight = 1
        for loop in loops:
            weight *= 1 if i not in loop or loop.rounds is None else loop.rounds
        total += weight
        waits += weight * text.count("dma.done.wait")
    windows = max((loop.windows or 0 for loop in loops), default=0)
    if windows:
        body = (x.last - x.first + 1 for x in loops if x.rounds is None)
        total += max(body, default=0) * (windows - 1)
    return Kernel(name, total, 0 if is_own else waits, windows > 1)


def _with_full_blocks(bundles: list[str], loop: _Loop) -> _Loop:
    """A loop of a kernel of jmask, with the rounds of full blocks if it copies rows."""
    body = " ".join(bundles[loop.first : loop.last + 1])
    if loop.rounds is None and len(_COPY.findall(body)) >= row_updates._UNROLL:
        return dataclasses.replace(loop, rounds=row_updates._BLOCK // row_updates._UNROLL)
    return loop


_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) [a-z][a-z0-9\-]*\(")
_CYCLES = re.compile(r'"estimated_cycles":"?(\d+)"?')
_OPERATION = re.compile(r" (fusion|custom-call|sort|scatter|gather)\(")
_ARRAY = re.compile(r"([a-z]+\d+)\[([\d,]+)\]")


def times(compiled: Any, folder: Path, generation: str) -> list[tuple[float, str]]:
    """Milliseconds and name of each kernel of a program, the longest first."""
    clock, bandwidth = GENERATIONS[generation]
    text = compiled.as_text()
    lines, in_entry = _instructions(text), _instructions(text.partition("\nENTRY ")[2])
    seconds_of: dict[str, float] = {}
    twins: dict[tuple[str, ...], str] = {}
    for kernel in kernels_of(folder):
        result, line = lines.get(kernel.name, ("", ""))
        cycles = _CYCLES.search(line)
        if cycles:
            seconds = int(cycles[1]) / (clock * 1e9)
        else:
            seconds = kernel.bundles / (clock * 1e9) + kernel.waits * WAIT
        if kernel.streams:
            seconds += 2 * _largest(result) / (bandwidth * 1e9)
        seconds_of[kernel.name] = seconds
        twins[_identity(kernel.name, result, line)] = kernel.name
    for name in in_entry.keys() - seconds_of.keys():
        twin = twins.get(_identity(name, *in_entry[name]))
        if twin is not None and _OPERATION.search(in_entry[name][1]):
            seconds_of[name] = seconds_of[twin]
    return sorted(((x * 1e3, name) for name, x in seconds_of.items()), reverse=True)


def _instructions(text: str) -> dict[str, tuple[str, str]]:
    """The type of the result and the line of each instruction."""
    matches = ((_INSTRUCTION.match(line), line) for line in text.splitlines())
    return {match[1]: (match[2], line) for match, line in matches if match}


def _identity(name: str, result: str, line: str) -> tuple[str, ...]:
    """What is the same for two instructions that are one kernel."""
    return re.sub(r"\.\d+$", "", name), result, line.partition("backend_config=")[2]


def _largest(result: str) -> int:
    """Bytes of the largest array, in lines of 128 entries."""
    sizes = [0]
    for dtype, shape in _ARRAY.findall(result):
        *rows, width = map(int, shape.split(","))
        size = int(re.sub(r"\D", "", dtype)) // 8
        for count in rows:
            size *= count
        sizes.append(size * (max(width, 128) if rows else width))
    return max(sizes)
