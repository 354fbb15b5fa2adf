"""`jmask.keep_memory`: the pages of a large array that is freed are there for the next one."""

import json
import subprocess
import sys

import pytest

import jmask
from jmask._kernels import keep_memory as module

# In a process of its own, whose allocator is as it starts. XLA allocates in its own threads,
# for some programs more than the heap of a thread has.
PROGRAM = """
import concurrent.futures, ctypes, json, resource
import jmask
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        array = libc.malloc(2**27)
        libc.memset(array, 1, 2**27)
        libc.free(array)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

before = new_pages()
done = jmask.keep_memory()
new_pages()
with concurrent.futures.ThreadPoolExecutor(1) as thread:
    print(json.dumps([done, before, new_pages(), thread.submit(new_pages).result()]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="there is no glibc")
def test_pages_are_kept():
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    done, before, *after = json.loads(found.stdout)
    if not done:
        pytest.skip("this C library keeps nothing")
    assert before > 200  # some 64 of 2 MB each time, or 32,768 small ones
    assert max(after) < before / 10


@pytest.mark.parametrize("refuses", ["the system", "musl", "glibc"])
def test_where_nothing_is_kept(monkeypatch, refuses):
    class Library:
        pass

    library = Library()
    if refuses == "glibc":
        library.mallopt = lambda parameter, value: 0
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: library)
    if refuses == "the system":
        monkeypatch.setattr(module.sys, "platform", "darwin")
    assert jmask.keep_memory() is False
