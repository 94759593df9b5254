"""Plans a search: how many trials train how many epochs on how large a part of the graph, within a budget.

Successive halving over the size of the subgraph and the epochs together (GraSH: Kochsiek, Niesel and Gemulla
2022, section 4). Costs are in full trainings: share of the training triples times share of the epochs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dglkge.errors import InputError

ROUNDING = 1e-9
"""Added before a quotient is rounded down: 3 / 0.1 must give 30 epochs of a tenth."""


@dataclass(frozen=True)
class Rung:
    """Trials of equal cost; the best of them go on to the next rung.

    Attributes
    ----------
    num_trials : int
    core : int
        k of the k-core that they train on; 0 for the whole graph.
    share : float
        Share of the training triples in it.
    num_epochs : int
        Of each trial.
    full_epochs : int
        Of a full training.
    """

    num_trials: int
    core: int
    share: float
    num_epochs: int
    full_epochs: int

    @property
    def trial_cost(self) -> float:
        """Cost of one trial, in full trainings."""
        return self.share * self.num_epochs / self.full_epochs

    @property
    def cost(self) -> float:
        """Cost of all trials, in full trainings."""
        return self.num_trials * self.trial_cost


def plan_rungs(
    num_trials: int, reduction: int, budget: float, full_epochs: int, shares: Sequence[float]
) -> list[Rung]:
    """Plan the rungs of a search.

    The last rung is one full training of the winner. The others share the rest of the budget equally, and a
    trial's cost is divided evenly between graph and epochs: each is reduced to about its square root.

    Parameters
    ----------
    num_trials : int
        Of the first rung.
    reduction : int
        Of this many trials the best goes on.
    budget : float
        Most cost of all rungs, in full trainings.
    full_epochs : int
        Epochs of a full training.
    shares : sequence of float
        Share of the training triples in the k-core, for k = 0, 1, ...; the first is 1.

    Returns
    -------
    list of Rung
        Of the first rung fewer trials than wanted, if one epoch on the densest core costs too much.

    Raises
    ------
    InputError
        If a number is out of range, or the budget is too small for a search.
    """
    if num_trials < 1:
        raise InputError(f"the number of trials must be at least 1, got {num_trials}")
    if reduction < 2:
        raise InputError(f"the reduction must be at least 2, got {reduction}")
    if full_epochs < 1:
        raise InputError(f"training.num_epochs must be at least 1 for a search, got {full_epochs}")
    if not budget >= 1:
        raise InputError(f"the budget must be at least 1 full training, got {budget:g}")
    final = Rung(1, 0, 1.0, full_epochs, full_epochs)
    counts = []
    while num_trials > 1:
        counts.append(num_trials)
        num_trials //= reduction
    rungs: list[Rung] = []
    for count in counts:
        rung_budget = (budget - 1) / len(counts)
        # A rung that could not have all its trials leaves fewer for the next.
        if rungs:
            count = min(count, rungs[-1].num_trials // reduction)
        if count < 2:
            break
        rung = _plan_rung(count, rung_budget, full_epochs, shares)
        if rung is None:
            least = 1 + len(counts) * 2 * min(share for share in shares if share > 0) / full_epochs
            raise InputError(
                f"a budget of {budget:g} full trainings is too small for a search over {counts[0]} trials: "
                f"the winner's own training costs 1, and two trials a rung need at least {least:.2f}"
            )
        rungs.append(rung)
    return [*rungs, final]


def _plan_rung(count: int, budget: float, full_epochs: int, shares: Sequence[float]) -> Rung | None:
    """Return the rung with the most trials up to a number; None if not even two can be paid."""
    while count >= 2:
        rung = choose_fidelity(count, budget / count, full_epochs, shares)
        if rung is not None:
            return rung
        count -= 1
    return None


def choose_fidelity(
    num_trials: int, trial_cost: float, full_epochs: int, shares: Sequence[float]
) -> Rung | None:
    """Choose the core and the epochs of trials of a given cost.

    The core has the share of triples nearest to the square root of the cost, by their ratio, among those on
    which at least one epoch can be paid. Epochs are as many as the cost allows.

    Returns
    -------
    Rung or None
        None if one epoch on the smallest core costs more.
    """
    wanted = math.sqrt(min(trial_cost, 1.0))
    best: Rung | None = None
    for core, share in enumerate(shares):
        if share <= 0:
            continue
        num_epochs = min(full_epochs, math.floor(trial_cost * full_epochs / share + ROUNDING))
        if num_epochs < 1:
            continue
        distance = abs(math.log(share / wanted))
        if best is None or distance < abs(math.log(best.share / wanted)):
            best = Rung(num_trials, core, share, num_epochs, full_epochs)
    return best
