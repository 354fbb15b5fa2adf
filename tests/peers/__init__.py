"""Other projects' own tests, run with jmask in place of what they test: `make test-peers`.

    optax's tests             every optimizer is `jmask.lazy` of it, on row-sparse gradients
    numpy.ma's tests          arithmetic and reductions are made with `jmask.numpy`, too
    torch's OpInfo samples    the operator of jmask with its name, on the same inputs

The suites come with the packages that pip installs; nothing of them is kept here. A plugin of
pytest puts jmask in place and says at the end what it left out, and why.
"""
