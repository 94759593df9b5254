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
    core : int
        k of the k-core that they train on; 0 for the whole graph.
    share : float
        Share of the training triples in it.
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
    trial's cost is divided evenly between graph and epochs: each is reduced to about its square root. The
    first rung has fewer trials than wanted, if one epoch on the densest core costs too much.

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

    Raises
    ------
    InputError
        If a number is out of range, or the budget is too small for a search.
    """
    for what, least, number in (
        ("the number of trials must be at least 1", 1, num_trials),
        ("the reduction must be at least 2", 2, reduction),
        ("training.num_epochs must be at least 1 for a search", 1, full_epochs),
        ("the budget must be at least 1 full training", 1, budget),
    ):
        if not number >= least:
            raise InputError(f"{what}, got {number:g}")
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
        # The most trials that can be paid, two at least.
        plans = (choose_fidelity(n, rung_budget / n, full_epochs, shares) for n in range(count, 1, -1))
        rung = next(filter(None, plans), None)
        if rung is None:
            needed = 1 + len(counts) * 2 * min(share for share in shares if share > 0) / full_epochs
            raise InputError(
                f"a budget of {budget:g} full trainings is too small for a search over {counts[0]} trials: "
                f"the winner's own training costs 1, and two trials a rung need at least {needed:.2f}"
            )
        rungs.append(rung)
    return [*rungs, final]


def choose_fidelity(
    num_trials: int, trial_cost: float, full_epochs: int, shares: Sequence[float]
) -> Rung | None:
    """Choose the core and the epochs of trials of a given cost.

    The core has the share of triples nearest to the square root of the cost, by their ratio, among those on
    which at least one epoch can be paid; None if there is none. Epochs are as many as the cost allows.
    """
    wanted = math.sqrt(min(trial_cost, 1.0))
    rungs = []
    for core, share in enumerate(shares):
        num_epochs = math.floor(trial_cost * full_epochs / share + ROUNDING) if share > 0 else 0
        if num_epochs >= 1:
            rungs.append(Rung(num_trials, core, share, min(full_epochs, num_epochs), full_epochs))
    return min(rungs, key=lambda rung: abs(math.log(rung.share / wanted)), default=None)
