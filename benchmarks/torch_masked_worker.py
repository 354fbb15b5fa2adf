"""torch's masked tensors; run by `other_interpreter.py`."""

import torch
from masked_operations import OPERATIONS, operands
from worker import serve


def build(operation, size):
    *data, mask = operands(size)
    valid = torch.from_numpy(mask)
    x, y = (torch.masked.masked_tensor(torch.from_numpy(d), valid) for d in data)

    def run():
        OPERATIONS[operation](torch, x, y)

    return lambda ids: run


if __name__ == "__main__":
    serve(build, torch.__version__)
