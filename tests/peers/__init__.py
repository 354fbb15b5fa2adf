"""Other projects' own tests, run with jmask in place of what they test: `make test-peers`.

| suite                     | what is replaced                                                    |
|---------------------------|---------------------------------------------------------------------|
| optax's tests             | every optimizer, by `jmask.lazy` of it on gradients made row-sparse |
| numpy.ma's tests          | arithmetic and reductions of masked arrays, by `jmask.numpy`        |
| `jax.test_util`           | the function that `check_grads` differentiates                      |
| torch's OpInfo samples    | the operator, by the one of jmask with its name                     |

The suites come with the packages that pip installs; nothing of them is kept here. A plugin of
pytest puts jmask in place and says at the end what it left out, and why.
"""
