"""Plans of searches: within the budget, by hand, and as good as any other choice of core and epochs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dglkge.errors import InputError
from dglkge.tuning.search import Rung, choose_fidelity, plan_rungs

some_shares = st.lists(st.floats(0.001, 1), max_size=12).map(lambda rest: [1.0, *sorted(rest, reverse=True)])


@settings(max_examples=200, deadline=None)
@given(
    num_trials=st.integers(1, 200),
    reduction=st.integers(2, 6),
    budget=st.floats(1, 10),
    full_epochs=st.integers(1, 300),
    shares=some_shares,
)
def test_plans_keep_the_budget(num_trials, reduction, budget, full_epochs, shares):
    try:
        rungs = plan_rungs(num_trials, reduction, budget, full_epochs, shares)
    except InputError as error:
        assert "is too small for a search" in str(error) and num_trials > 1
        return
    assert (
        sum(rung.num_trials * rung.share * rung.num_epochs / full_epochs for rung in rungs) <= budget + 1e-6
    )
    assert rungs[-1] == Rung(1, 0, 1.0, full_epochs, full_epochs)
    assert rungs[0].num_trials <= num_trials
    for rung, after in zip(rungs, rungs[1:]):
        assert (
            rung.num_trials > after.num_trials
            and rung.num_trials // reduction >= after.num_trials
            or (after is rungs[-1])
        )
        assert rung.share == shares[rung.core] and 1 <= rung.num_epochs <= full_epochs
        assert rung.cost <= (budget - 1) / (len(rungs) - 1) * 2 + 1e-6


def test_plan_by_hand():
    """Two full trainings for 16 + 4 trials: 1/16 and 1/4 each, so a fourth and a half of graph and epochs."""
    shares = [1.0, 1.0, 0.8, 0.5, 0.25, 0.1]
    rungs = plan_rungs(16, 4, 3, 40, shares)
    assert rungs == [Rung(16, 4, 0.25, 10, 40), Rung(4, 3, 0.5, 20, 40), Rung(1, 0, 1.0, 40, 40)]
    assert [rung.cost for rung in rungs] == [1, 1, 1]
    assert plan_rungs(1, 4, 1, 7, shares) == [Rung(1, 0, 1.0, 7, 7)]


@settings(max_examples=100, deadline=None)
@given(cost=st.floats(0.001, 2), full_epochs=st.integers(1, 100), shares=some_shares)
def test_fidelity_against_all_choices(cost, full_epochs, shares):
    found = choose_fidelity(5, cost, full_epochs, shares)
    wanted = math.sqrt(min(cost, 1))
    affordable = [share for share in shares if share / full_epochs <= cost + 1e-9]
    if found is None:
        assert not [share for share in shares if share / full_epochs <= cost]
        return
    assert max(found.share / wanted, wanted / found.share) <= 1e-9 + min(
        max(share / wanted, wanted / share) for share in affordable
    )
    assert found.trial_cost <= cost + 1e-6
    more = found.share * (found.num_epochs + 1) / full_epochs
    assert found.num_epochs == full_epochs or more > cost


def test_few_epochs_mean_few_trials():
    """One epoch on the densest core is a tenth of a training of two epochs."""
    rungs = plan_rungs(64, 4, 2, 2, [1.0, 0.2])
    assert [rung.num_trials for rung in rungs][0] == 3 and rungs[0].num_epochs == 1
    assert sum(rung.cost for rung in rungs) <= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, 3, 10), "the number of trials must be at least 1, got 0"),
        ((9, 1, 3, 10), "the reduction must be at least 2, got 1"),
        ((9, 4, 0.5, 10), "the budget must be at least 1 full training, got 0.5"),
        ((9, 4, 3, 0), "training.num_epochs must be at least 1 for a search, got 0"),
        (
            (9, 4, 1, 10),
            "a budget of 1 full trainings is too small for a search over 9 trials: the winner's own",
        ),
    ],
)
def test_mistakes(arguments, words):
    with pytest.raises(InputError, match=words):
        plan_rungs(*arguments, [1.0, 0.5])
