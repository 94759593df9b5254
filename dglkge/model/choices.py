"""Components of other packages that a configuration chooses by name: optimizers and negative samplers.

An optimizer is an update rule; its class states the facts that a plan needs, and imports neither torch nor
DGL. The samplers compile loops: an entry here has the facts, and the place of the class.
"""

from __future__ import annotations

import functools
import math
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, Field, create_model

from dglkge.optim.rules import Adagrad, Adam, RowWiseAdagrad, UpdateRule
from dglkge.registry import Registry
from dglkge.settings import ComponentSettings, FreeSettings
from dglkge.typing import Side


@dataclass(frozen=True)
class Choice:
    """A class that is imported when it is chosen, ``"package.module:Class"`` or the class itself."""

    help: str
    place: str | Callable[..., Any]

    def load(self) -> Any:
        """Return the class."""
        return self.place if callable(self.place) else pkgutil.resolve_name(self.place)


BIGRAPH_OPTIMIZER = "row_adagrad"
"""The optimizer that PyTorch-BigGraph trains entities with."""

OPTIMIZERS: Registry[type[UpdateRule]] = Registry("optimizer")
OPTIMIZERS.register("sparse_adagrad")(Adagrad)
OPTIMIZERS.register(BIGRAPH_OPTIMIZER)(RowWiseAdagrad)
OPTIMIZERS.register("sparse_adam")(Adam)


class ScheduleSettings(FreeSettings):
    """A class of ``torch.optim.lr_scheduler`` with its options."""

    every: Literal["epoch", "batch"] = "epoch"
    """one step after each epoch or batch; ReduceLROnPlateau: after each ranking of the valid split."""


class RelationSettings(ComponentSettings):
    """The optimizer of the rows of relations."""

    lr: float = Field(0.0, ge=0)
    """learning rate of the relations; 0: that of the entities."""


class OptimizerSettings(ComponentSettings):
    """Settings of every optimizer; further ones are the fields of its rule."""

    lr: float = Field(0.1, gt=0)
    """learning rate."""
    weight_decay: float = Field(0.0, ge=0)
    """multiple of a row added to its gradient, as torch has it; untouched rows do not decay."""
    decoupled_weight_decay: bool = False
    """multiply touched rows by 1 - lr * weight_decay, as AdamW."""
    clip_norm: float = Field(0.0, ge=0)
    """limit of the 2-norm of a batch's gradient, of all rows and dense parameters; 0: none."""
    clip_value: float = Field(0.0, ge=0)
    """limit of each number of a row's or dense parameter's gradient, before clip_norm; 0: none."""
    schedule: ScheduleSettings | None = None
    """class of torch.optim.lr_scheduler with options: {name: CosineAnnealingLR, T_max: 20}; null: none."""
    warmup_batches: int = Field(0, ge=0)
    """batches in which the rates grow linearly to the schedule's."""


Family = TypeVar("Family", bound=ComponentSettings)


def rule_settings(family: type[Family]) -> Callable[[type[UpdateRule]], type[Family]]:
    """Return a function that adds the fields of an update rule to a class of settings."""

    @functools.cache
    def make(rule: type[UpdateRule]) -> type[Family]:
        fields: dict[str, Any] = {}
        for name, value in rule().hyper.items():
            # betas: a list of numbers, of which the rule checks the length.
            kind: Any = tuple[float, ...] if isinstance(value, tuple) else type(value)
            checked = Annotated[kind, AfterValidator(functools.partial(_checked, rule, name))]
            fields[name] = (checked, Field(value, description="as in the rule's class, dglkge.optim"))
        # pydantic would search every frame of the stack for the source of the class, which has none.
        no_source = {"use_attribute_docstrings": False}
        return create_model(
            f"{rule.__name__}{family.__name__}", __base__=family, __cls_kwargs__=no_source, **fields
        )

    return make


def _checked(rule: type[UpdateRule], name: str, value: Any) -> Any:
    """Return a hyper-parameter that its rule takes; a ValueError says what is wrong."""
    rule(**{name: value})
    return value


def state_widths(optimizer: str, width: int) -> tuple[int, ...]:
    """Return how many float32 numbers of state a row of that width has in each tensor of an optimizer."""
    return tuple(math.prod(shape) for shape in OPTIMIZERS.get(optimizer)().state_shapes(width).values())


class NegativeSettings(ComponentSettings):
    """Settings of every source of negatives; ``takes_all``: every entity of the type is a negative."""

    takes_all: ClassVar[bool] = False

    num_for_heads: int = Field(-1, ge=-1, le=0)
    """0: heads are not predicted; -1: they are."""
    num_for_tails: int = Field(-1, ge=-1, le=0)
    """0: tails are not predicted; -1: they are."""
    chunk_size: int = Field(1000, ge=1)
    """positives of a global batch that share their negatives."""
    mask_known: bool = False
    """negatives that are known answers in training do not count."""

    @property
    def scores_own(self) -> bool:
        """Whether the query's own entity is one negative more."""
        return bool(getattr(self, "own_entity", False))

    @property
    def per_side(self) -> dict[Side, int]:
        """Negatives of a query for each side; 0: the side is not predicted."""
        counts = {Side.HEAD: self.num_for_heads, Side.TAIL: self.num_for_tails}
        # 1 stands for all entities.
        usual = int(getattr(self, "num_uniform", 1))
        return {side: usual if count < 0 else count for side, count in counts.items()}

    @property
    def shares(self) -> tuple[float, float, float]:
        """Shares that are drawn from the whole graph, the machine's partition and the batch."""
        return (1.0, 0.0, 0.0)

    @property
    def power(self) -> float:
        """Power of an entity's number of triples in proportion to which it is drawn; 0: uniformly."""
        return float(getattr(self, "degree_power", 0.0))


class AllEntitiesSettings(NegativeSettings):
    """Settings of the sampler that takes every entity of the type."""

    takes_all: ClassVar[bool] = True


class SamplerSettings(NegativeSettings):
    """Settings of a sampler that draws negatives."""

    num_uniform: int = Field(1000, ge=1)
    """negatives of the right type, shared by a chunk's positives."""
    num_for_heads: int = Field(-1, ge=-1)
    """negatives of (?, r, t); -1: num_uniform; 0: heads are not predicted."""
    num_for_tails: int = Field(-1, ge=-1)
    """negatives of (h, r, ?), as num_for_heads; equal numbers: both sides share their negatives."""
    own_entity: bool = True
    """the query's own entity is one negative more: (h, r, h) for (h, r, ?)."""


class MixedSettings(SamplerSettings):
    """Settings of the sampler that mixes three sources."""

    global_share: float = Field(1.0, ge=0)
    """share drawn from the whole graph; the three sum to 1."""
    local_share: float = Field(0.0, ge=0)
    """share drawn from the machine's partition (one machine: all)."""
    in_batch_share: float = Field(0.0, ge=0)
    """share drawn from the trainer's positives of the chunk."""
    degree_power: float = Field(0.0, ge=0)
    """draw global and local negatives by this power of their degree (word2vec: 0.75); 0: evenly."""

    @property
    def shares(self) -> tuple[float, float, float]:
        return (self.global_share, self.local_share, self.in_batch_share)


@dataclass(frozen=True)
class SamplerChoice(Choice):
    """A negative sampler: a class with the constructor of ``dglkge.sampling.negatives.MixedNegatives``.

    Options beside the fields of :class:`MixedSettings` are arguments of the constructor.
    """

    Settings: type[NegativeSettings] = SamplerSettings


NEGATIVE_SAMPLERS: Registry[SamplerChoice] = Registry("negative sampler")
_SAMPLERS = "dglkge.sampling.negatives"
_MIXED = "uniform over the graph, the machine's partition and the batch, by the three shares"
_ALL = "every entity of the type; training.objective one_vs_all is the same loss of means, at less cost"
ALL_ENTITIES = "all_entities"
NEGATIVE_SAMPLERS.register("mixed")(SamplerChoice(_MIXED, f"{_SAMPLERS}:MixedNegatives", MixedSettings))
NEGATIVE_SAMPLERS.register(ALL_ENTITIES)(
    SamplerChoice(_ALL, f"{_SAMPLERS}:AllNegatives", AllEntitiesSettings)
)


class TransformSettings(ComponentSettings):
    """Settings of every row transform: none but the name."""


@dataclass(frozen=True)
class TransformChoice(Choice):
    """A row transform: a class with the constructor of :class:`dglkge.step.contracts.RowTransform`."""

    Settings: type[TransformSettings] = TransformSettings


NO_TRANSFORM = "none"

ROW_TRANSFORMS: Registry[TransformChoice] = Registry("row transform")
ROW_TRANSFORMS.register(NO_TRANSFORM)(TransformChoice("no further transform", ""))


class ObjectiveSettings(ComponentSettings):
    """Settings of every objective: none but the name.

    ``over_all``: all entities of the answer's type are candidates, else negatives are sampled.
    ``by_queries``: a batch is of queries with all their answers, else of triples.
    """

    over_all: ClassVar[bool] = False
    by_queries: ClassVar[bool] = False

    @property
    def smoothing(self) -> float:
        """Share of each label that is spread over all candidates."""
        return float(getattr(self, "label_smoothing", 0.0))


class CandidateSettings(ObjectiveSettings):
    """Settings of objectives over all candidates."""

    over_all: ClassVar[bool] = True

    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """share of each label spread over all candidates."""


class QuerySettings(CandidateSettings):
    """Settings of objectives over all candidates whose batches are queries."""

    by_queries: ClassVar[bool] = True


@dataclass(frozen=True)
class ObjectiveChoice(Choice):
    """An objective; over all candidates, ``place`` makes its queries: it is called with
    :class:`dglkge.step.objectives.all_candidates.QueryOptions` and returns a ``QueryMaker`` of the same
    module.
    """

    Settings: type[ObjectiveSettings] = ObjectiveSettings


NEGATIVE_SAMPLING, ONE_VS_ALL, K_VS_ALL = "negative_sampling", "one_vs_all", "k_vs_all"

OBJECTIVES: Registry[ObjectiveChoice] = Registry("objective")
OBJECTIVES.register(NEGATIVE_SAMPLING)(ObjectiveChoice("each answer against sampled negatives", ""))
_QUERIES = "dglkge.step.objectives.one_vs_all"
_ONE = "each answer against all entities of the type, without sampled negatives"
_K = "all answers of a query at once, a batch being of queries (h, r, ?) and (?, r, t)"
OBJECTIVES.register(ONE_VS_ALL)(ObjectiveChoice(_ONE, f"{_QUERIES}:edge_queries", CandidateSettings))
OBJECTIVES.register(K_VS_ALL)(ObjectiveChoice(_K, f"{_QUERIES}:AnsweredQueries", QuerySettings))
