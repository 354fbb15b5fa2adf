"""The elementwise functions of torch's masked tensors, and what they are called here.

Where the names differ docs/porting.md has them.
"""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text()
(_TABLE,) = re.findall(r"^\| torch \| `jmask.numpy` \|\n(.*?)\n\n", _PAGE, re.S | re.M)

TORCH_NAMES = dict(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", _TABLE, re.M))

REFERENCE_UNARY = """
    abs absolute acos arccos acosh arccosh angle asin arcsin asinh arcsinh atan arctan
    atanh arctanh bitwise_not ceil clamp clip conj_physical cos cosh deg2rad digamma erf
    erfc erfinv exp exp2 expm1 fix floor frac lgamma log log10 log1p log2 logit i0 isnan
    nan_to_num neg negative positive rad2deg reciprocal round rsqrt sigmoid sign sgn
    signbit sin sinc sinh sqrt square tan tanh trunc
""".split()
REFERENCE_BINARY = """
    add atan2 arctan2 bitwise_and bitwise_or bitwise_xor bitwise_left_shift
    bitwise_right_shift div divide floor_divide fmod logaddexp logaddexp2 mul multiply
    nextafter remainder sub subtract true_divide eq ne le ge gt lt equal not_equal
    less_equal greater_equal greater less maximum minimum fmax fmin pow
""".split()
# The name in `jmask.numpy` of a function of torch.
name_here = lambda name: TORCH_NAMES.get(name, name)
