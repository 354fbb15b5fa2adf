"""Which collectives a compiled program runs, and on how many bytes.

%a = f32[16,8] all-gather(f32[2,8] %x)        16 * 8 * 4 bytes reach each device
"""

import math
import re
from typing import Any

_INSTRUCTION = re.compile(
    r" = (?P<result>.*?) (?P<opcode>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"ragged-all-to-all|collective-permute|collective-broadcast)(?:-start)?\((?P<operands>[^)]*)\)"
)
_ARRAY = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_BITS = {
    "pred": 8,
    "s32": 32,
    "u32": 32,
    "f32": 32,
    "s64": 64,
    "u64": 64,
    "f64": 64,
    "bf16": 16,
}


def sizes(types: str) -> list[int]:
    """Bytes of the arrays in a type of HLO, `(f32[8,4]{1,0}, s32[])`."""
    return [
        math.prod(int(n) for n in dimensions.split(",") if n) * _BITS[dtype] // 8
        for dtype, dimensions in _ARRAY.findall(types)
    ]


def collectives(compiled: Any) -> list[tuple[str, int]]:
    """The collectives of a program: opcode and bytes that a device moves."""
    text = compiled.as_text()
    types = dict(re.findall(r"(%[\w.-]+) = (\(.*?\)|\S+) ", text))
    found = []
    for instruction in _INSTRUCTION.finditer(text):
        opcode, operands = instruction["opcode"], instruction["operands"]
        given = sum(sum(sizes(types[name])) for name in re.findall(r"%[\w.-]+", operands))
        made = sum(sizes(instruction["result"]))
        found.append((opcode, {"all-gather": made, "all-reduce": 2 * given}.get(opcode, given)))
    return found
