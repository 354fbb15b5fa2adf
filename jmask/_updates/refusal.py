"""The error of a transformation that `lazy` cannot lift, with what to do instead."""


def refusal(why: str, advice: str | None = None) -> ValueError:
    """A ValueError that says why `lazy` refuses and what to use."""
    advice = advice or (
        "Chain jmask.densify() before it to apply it to the dense gradient, keep it for "
        "the dense parameters with optax.partition, or use an optimizer that treats every "
        "row by itself."
    )
    return ValueError(f"jmask.lazy cannot wrap this optax transformation: {why}. {advice}")
