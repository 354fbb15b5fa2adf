"""The error of a transformation that `lazy` cannot lift, with what to do instead."""


class NotRowLocalError(ValueError):
    """Why `lazy` refuses a transformation, and what to use.

    Args:
        why: what the transformation does.
        advice: what to do instead; by default what helps with any transformation.
    """

    def __init__(self, why: str, advice: str | None = None):
        advice = advice or (
            "Chain jmask.densify() before it to apply it to the dense gradient, keep it for "
            "the dense parameters with optax.partition, or use an optimizer that treats every "
            "row by itself."
        )
        super().__init__(f"jmask.lazy cannot wrap this optax transformation: {why}. {advice}")
