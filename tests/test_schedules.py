import pytest

from sr.errors import SRError
from sr.schedules import Cosine, MultiStep, Schedule


def test_cosine():
    schedule = Cosine(warmup=0.2, final=0.1)
    assert schedule(0) == 0
    assert schedule(0.1) == pytest.approx(0.5)
    assert schedule(0.2) == pytest.approx(1)
    assert schedule(0.6) == pytest.approx(0.55)  # half-way down: the mean of 1 and 0.1
    assert schedule(1) == pytest.approx(0.1)
    assert schedule(1.5) == pytest.approx(0.1)


def test_multi_step():
    schedule = MultiStep([0.75, 0.5])
    assert [schedule(p) for p in (0, 0.49, 0.5, 0.74, 0.75, 1)] == [1, 1, 0.5, 0.5, 0.25, 0.25]


def test_constant():
    assert Schedule()(0.3) == 1


def test_steps_in_place_of_fractions_are_refused():
    with pytest.raises(SRError, match="fractions of the run"):
        MultiStep([2000])
    with pytest.raises(SRError, match="fraction of the run"):
        Cosine(warmup=500)
