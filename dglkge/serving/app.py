"""Routes of the explorer: its page, and REST with a description in OpenAPI."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field, model_validator
from starlette.exceptions import HTTPException

from dglkge import __version__
from dglkge.errors import InputError
from dglkge.inference.trained_model import UnknownEntityError
from dglkge.serving.explorer import Explorer
from dglkge.serving.server import MAX_BODY_BYTES, Guard, HostNames

logger = logging.getLogger(__name__)

MAX_K = 1000
MAX_QUERIES = 1000
MAX_ANSWERS = 100_000
"""Of all queries of a request: their number times k."""

MAX_TRIPLES = 10_000
MAX_NAME_LENGTH = 10_000
MAX_WAITING = 64
"""Model calls that wait or run; more are refused with status 503."""

PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/explorer.js": ("explorer.js", "text/javascript; charset=utf-8"),
    "/explorer.css": ("explorer.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
"""Path, file and type of the page's resources."""

NO_SUCH_PAGE = """<!DOCTYPE html><html lang="en"><title>dglkge</title>
<p>There is no such page. <a href="/">Open the explorer</a></html>"""

PUBLIC = {*PAGE_FILES, "/health", "/openapi.json"}
"""Paths that need no token: they hold nothing of the run."""

DESCRIPTION = f"""Predictions, scores, similar entities and known triples of a trained model.

Errors are JSON, `{{"error": "..."}}`: 400 bad input, 401 no or wrong token, 403 request from another site's
page, 404 unknown entity, 413 body of more than {MAX_BODY_BYTES} bytes, 415 not JSON, 422 a value outside its
limits, 503 more than {MAX_WAITING} requests wait for the model."""

Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]
Names = Annotated[list[Name], Field(max_length=MAX_QUERIES)]
K = Annotated[int, Field(ge=1, le=MAX_K)]
Role = Literal["head", "tail"]
Treatment = Literal["mark", "drop", "keep"]
Candidates = Literal["all", "seen"]
Score = Annotated[float | None, Field(description="null if it is no finite number")]


class Strict(BaseModel, extra="forbid"):
    """Body of a request; an unknown field is an error."""


class PredictQuery(Strict):
    """A triple with one part missing: left out, null or ``?``."""

    head: Name | None = None
    relation: Name | None = None
    tail: Name | None = None


class PredictRequest(Strict):
    """Complete triples with one part missing."""

    queries: Annotated[list[PredictQuery], Field(min_length=1, max_length=MAX_QUERIES)]
    k: Annotated[K, Field(description="answers to each query")] = 10
    known: Treatment | None = Field(None, description="known answers: marked, left out, or not looked up")
    candidates: Candidates = Field("all", description="all of the type, or seen on that side of the relation")

    @model_validator(mode="after")
    def _within_limits(self) -> PredictRequest:
        count = len(self.queries) * self.k
        if count > MAX_ANSWERS:
            question = f"{len(self.queries)} queries with k={self.k} ask for {count} answers"
            raise InputError(f"{question}; allowed: {MAX_ANSWERS}")
        return self


class Triple(Strict):
    """A triple by names."""

    head: Name
    relation: Name
    tail: Name


class Scored(Triple):
    """A triple with its score."""

    score: Score
    probability: float | None = Field(description="null unless dglkge calibrate was run")


class ScoredNames(Scored):
    """A triple with its score and split."""

    known_from: str | None = Field(description="first split that has the triple")


class PredictedTriple(ScoredNames):
    """One answer."""

    rank: int


class PredictResult(PredictQuery):
    """Answers to one query, the best first."""

    missing: Literal["head", "relation", "tail"] | None
    type: str | None = Field(description="entity type of the answers")
    answers: list[PredictedTriple]
    problem: str | None = Field(description="reason why there are no answers")


class ScoreRequest(Strict):
    """Score given triples; an unknown name is a problem of its row."""

    triples: Annotated[list[Triple], Field(min_length=1, max_length=MAX_TRIPLES)]


class ScoredTriple(ScoredNames):
    """A triple with its score, or with a problem."""

    problem: str | None


class CompleteRequest(Strict):
    """Find likely missing triples of some heads or relations."""

    heads: Names | None = None
    relations: Names | None = None
    min_probability: float | None = Field(None, gt=0, le=1, description="of dglkge calibrate; .5 without k")
    k: Annotated[K | None, Field(description="tails of each head and relation")] = None
    candidates: Candidates = "all"
    limit: Annotated[int, Field(ge=1, le=MAX_TRIPLES, description="best of all")] = 100


class AskRequest(Strict):
    """Answer a question of several hops."""

    question: Annotated[Name, Field(description="as ?x : (Alice, knows, ?y), not (?y, likes, ?x)")]
    k: K = 10
    beam: Annotated[K, Field(description="entities of other variables that go on")] = 16


class PathLink(Triple):
    """A link that led to an answer."""

    probability: float
    known: bool = Field(description="a triple of the data set")
    is_negated: bool = Field(alias="not")


class MultiHopAnswer(BaseModel):
    """An answer with its path."""

    rank: int
    entity: str
    probability: float
    path: list[PathLink]


class ExplainRequest(Triple):
    """Find the reasons for a link."""

    k: Annotated[K, Field(description="reasons of each kind")] = 5


class InfluentialTriple(Triple):
    """A training triple that raises the score."""

    of: Role = Field(description="end of the link whose row it moves")
    influence: float = Field(description="fall of the score without it, overestimated; orders them")


class RuleWithPath(BaseModel):
    """A rule that implies the link."""

    rule: str
    confidence: float
    support: int
    pairs: int
    path: list[Triple]


class SimilarLink(BaseModel):
    """A known link that shares an end with the link."""

    entity: str
    instead_of: Role
    cosine: float


class ExplainResponse(Scored):
    """The strongest reasons first."""

    triples: list[InfluentialTriple]
    rules: list[RuleWithPath]
    similar: list[SimilarLink]


class AttributesRequest(Strict):
    """Predict a number of entities from those of some."""

    values: Annotated[dict[Name, float], Field(max_length=MAX_TRIPLES, description="numbers by entity")]
    type: Annotated[Name | None, Field(description="needed if several types have the first name")] = None
    k: K = 10
    least: Annotated[bool, Field(description="entities with the smallest numbers")] = False
    known: Annotated[bool, Field(description="also entities with a given value")] = False


class UnseenRequest(Strict):
    """Find what is near an entity that the run does not know, and complete triples of it."""

    name: Name
    type: Annotated[Name | None, Field(description="needed if several types have features")] = None
    text: Annotated[Name | None, Field(description="encoded as those that dglkge data vectors wrote")] = None
    vector: list[float] | None = Field(None, max_length=MAX_NAME_LENGTH, description="as in features.files")
    triples: list[Triple] | None = Field(
        None, max_length=MAX_QUERIES, description="known triples of it; their relations give its type"
    )
    queries: Annotated[list[PredictQuery], Field(max_length=MAX_QUERIES)] = []
    k: Annotated[int, Field(ge=1, le=MAX_ANSWERS // MAX_QUERIES)] = 10


class PredictedNumber(BaseModel):
    """The number of an entity."""

    entity: str
    predicted: float
    known: float | None


class SimilarEntity(BaseModel):
    """An entity and its cosine with the given one."""

    rank: int
    name: str
    cosine: Score


class Entity(BaseModel):
    """A name and its type."""

    name: str
    type: str


class RelationFacts(BaseModel):
    """A relation; ``relation`` is its label, which identifies it alone."""

    relation: str
    name: str
    head_type: str
    tail_type: str
    triples: int | None = Field(description="in all splits; null without a data set")


class AboutEntity(BaseModel):
    """Answers about one entity."""

    entity: str
    type: str


class OtherEntity(Entity):
    """The other entity of a known triple."""

    split: str


class TripleGroup(BaseModel):
    """Known triples of an entity with one relation, in one role."""

    relation: str
    role: Role = Field(description="place of the given entity")
    count: int = Field(description="of all, also beyond the limit")
    others: list[OtherEntity]


class PredictResponse(BaseModel):
    """In the order of the queries."""

    results: list[PredictResult]


class ScoreResponse(BaseModel):
    """In the order of the triples."""

    triples: list[ScoredTriple]


class CompleteResponse(BaseModel):
    """The most likely first."""

    triples: list[Scored]


class AskResponse(BaseModel):
    """The most likely first."""

    type: str = Field(description="entity type of the answers")
    answers: list[MultiHopAnswer]


class AttributesResponse(BaseModel):
    """The greatest or smallest numbers first."""

    r2: float = Field(description="of given values that are predicted from others")
    mean_error: float
    entities: list[PredictedNumber]


class SimilarResponse(AboutEntity):
    """The most similar first."""

    method: Literal["exact", "faiss"]
    similar: list[SimilarEntity]


class UnseenResponse(AboutEntity):
    """The most similar first; results in the order of the queries."""

    similar: list[SimilarEntity]
    results: list[PredictResult]


class EntitiesResponse(BaseModel):
    """In alphabetical order, then names that have the text elsewhere; without a text, by training triples."""

    entities: list[Entity]


class RelationsResponse(BaseModel):
    """By id."""

    relations: list[RelationFacts]


class TriplesResponse(AboutEntity):
    """Groups with most triples first."""

    triples: int
    groups: list[TripleGroup]


class HealthResponse(BaseModel):
    """Needs no token."""

    status: Literal["ok"]
    version: str
    needs_token: bool


QUESTIONS: dict[type[Strict], type[BaseModel]] = {
    PredictRequest: PredictResponse,
    CompleteRequest: CompleteResponse,
    AskRequest: AskResponse,
    ExplainRequest: ExplainResponse,
    AttributesRequest: AttributesResponse,
    UnseenRequest: UnseenResponse,
    ScoreRequest: ScoreResponse,
}
"""Body and answer of each route to a method of :class:`Explorer`; the body's docstring describes it."""


class BusyError(Exception):
    """Too many requests wait for the model."""


class ModelCalls:
    """The one thread that runs the model, and the queue before it.

    One call at a time uses all of torch's threads: several at a time would only share the cores, and each
    would need memory of its own for scores.
    """

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, "model", torch.set_num_threads, (threads,))
        self._calls: set[Future[Any]] = set()

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function in the thread; BusyError if :data:`MAX_WAITING` calls wait or run already."""
        if len(self._calls) >= MAX_WAITING:
            raise BusyError
        call = self._pool.submit(function, *arguments)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await asyncio.wrap_future(call)

    def close(self) -> bool:
        """Drop waiting calls; return whether one still runs: the interpreter would wait for it."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        return any(call.running() for call in self._calls.copy())


def create_app(explorer: Explorer, calls: ModelCalls, hosts: HostNames, token: str | None = None) -> Guard:
    """Build the ASGI application.

    Routes of the model are coroutines that wait for ``calls``. Those that only look names and triples up are
    plain functions, which FastAPI runs in its own threads; none blocks the event loop.
    """
    # No pages of documentation: FastAPI's load their scripts from other sites.
    about: dict[str, Any] = {"title": "dglkge serve", "version": __version__, "description": DESCRIPTION}
    app = FastAPI(**about, docs_url=None, redoc_url=None, exception_handlers=_error_handlers())
    for path, (name, media_type) in PAGE_FILES.items():
        app.get(path, include_in_schema=False)(_page((PAGE_FOLDER / name).read_bytes(), media_type))

    @app.get("/health", response_model=HealthResponse)
    def health() -> Response:
        """Say that the server answers."""
        return JSONResponse({"status": "ok", "version": __version__, "needs_token": token is not None})

    @app.get("/model")
    def model() -> Response:
        """Describe the model, and how similar entities are searched."""
        return JSONResponse(explorer.describe())

    @app.get("/relations", response_model=RelationsResponse)
    def relations() -> Response:
        """List the relations."""
        return JSONResponse({"relations": explorer.relations})

    @app.get("/entities", response_model=EntitiesResponse)
    def entities(
        prefix: Name = "",
        type: Name | None = None,
        k: K = 20,
        anywhere: Annotated[bool, Query(description="also names that contain the text elsewhere")] = False,
    ) -> Response:
        """Complete the beginning of a name, in upper or lower case; without one, those with most triples."""
        return JSONResponse({"entities": explorer.entities(prefix, type, k, anywhere)})

    @app.get("/triples", response_model=TriplesResponse)
    def triples(
        entity: Name,
        type: Name | None = None,
        relation: Name | None = None,
        role: Role | None = None,
        limit: Annotated[int, Query(ge=0, le=MAX_K, description="of each relation and role")] = 20,
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
    ) -> Response:
        """List the known triples of an entity by relation."""
        return JSONResponse(explorer.triples(entity, type, relation, role, limit, offset))

    @app.get("/similar", response_model=SimilarResponse)
    async def similar(entity: Name, type: Name | None = None, k: K = 10) -> Response:
        """Find the entities of the same type with the greatest cosines."""
        return JSONResponse(await calls.run(explorer.similar, entity, type, k))

    for kind in QUESTIONS:
        _add_question(app, explorer, calls, kind)
    return Guard(app, hosts, PUBLIC, token)


def _add_question(app: FastAPI, explorer: Explorer, calls: ModelCalls, kind: type[Strict]) -> None:
    """Add the route of a body to the explorer's method of that name."""
    name, response = kind.__name__.removesuffix("Request").lower(), QUESTIONS[kind]

    async def ask(body: Strict) -> Response:
        fields = await calls.run(functools.partial(getattr(explorer, name), **body.model_dump()))
        # A list is the answer's only field.
        return JSONResponse(
            dict.fromkeys(response.model_fields, fields) if isinstance(fields, list) else fields
        )

    ask.__annotations__["body"] = kind
    app.post(f"/{name}", response_model=response, name=name, description=kind.__doc__)(ask)


def _page(content: bytes, media_type: str) -> Callable[[], Response]:
    """Return the endpoint of a file of the page."""
    return lambda: Response(content, media_type=media_type)


def _error_handlers() -> dict[Any, Any]:
    """Return what makes JSON with one line of text of every error."""

    def refuse(status: int, text: str, headers: dict[str, str] | None = None) -> JSONResponse:
        return JSONResponse({"error": " ".join(text.split())}, status, headers)

    def invalid(_request: Request, error: RequestValidationError) -> Response:
        problems = []
        for fault in error.errors()[:3]:
            if fault["type"] == "json_invalid":
                reason, place = fault["ctx"]["error"], fault["loc"][1]
                return refuse(400, f"the body is not JSON: {reason} at character {place}")
            field = ".".join(str(part) for part in fault["loc"][1:]) or str(fault["loc"][0])
            problems.append(f"{field}: {fault['msg']}, got {_shortened(fault.get('input'))}")
        more = len(error.errors()) - len(problems)
        return refuse(422, "; ".join(problems) + (f"; and {more} more" if more else ""))

    def no_such_path(request: Request, _error: Exception) -> Response:
        if "text/html" in request.headers.get("accept", ""):  # a person's browser
            return Response(NO_SUCH_PAGE, 404, media_type="text/html")
        known = ", ".join(sorted(request.app.openapi()["paths"]))
        return refuse(404, f"there is no {_shortened(request.url.path)}; there are {known}")

    busy = f"more than {MAX_WAITING} requests wait for the model; try again later"
    return {
        InputError: lambda _, error: refuse(400, str(error)),
        UnknownEntityError: lambda _, error: refuse(404, str(error)),
        BusyError: lambda *_: refuse(503, busy, {"Retry-After": "1"}),
        RequestValidationError: invalid,
        HTTPException: lambda _, error: refuse(error.status_code, error.detail),  # e.g. no UTF-8
        404: no_such_path,
        405: lambda to, _: refuse(405, f"{to.url.path} is not asked with {to.method}; see /openapi.json"),
        # The server logs the traceback; it is not for those who ask.
        Exception: lambda *_: refuse(500, "internal error; the server's log has the details"),
    }


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
