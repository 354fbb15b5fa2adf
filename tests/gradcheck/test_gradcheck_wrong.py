"""Every gradient of the table of wrong ones is refused, slowly and fast, and located."""

import pytest

import jmask
from tests.wrong_gradients import WRONG

pytestmark = pytest.mark.sampled(15)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.dtype_promotion
def test_wrong_gradient(name):
    case = WRONG[name]
    options = {"masked": case.masked, "modes": case.modes, "order": case.order}
    assert jmask.gradcheck(case.right, case.args, fast=True, **options)
    for fast in (False, True):
        with pytest.raises(jmask.GradcheckError, match=case.says) as caught:
            jmask.gradcheck(case.wrong, case.args, fast=fast, **options)
        message = str(caught.value)
        assert "to try" in message.lower()
        if "numerical" in message:
            assert f"masked={case.masked}" in message
            assert "analytical" in message
            assert "mode" in message


def test_there_are_enough():
    assert len(WRONG) >= 20
