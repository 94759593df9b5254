"""REST against the Python interface of the run."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.data.vocabulary import Vocabulary
from dglkge.serving.server import MAX_BODY_BYTES, MIN_TOKEN_LENGTH, HostNames
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import calibrated
from tests.inference.link_scores import names_of
from tests.serving.conftest import IMAGE, ODD, SCRIPT

pytest.importorskip("fastapi", reason="FastAPI is not installed")
pytest.importorskip("httpx", reason="httpx, which FastAPI's TestClient needs, is not installed")

from fastapi.testclient import TestClient

from dglkge.serving import app as app_module
from dglkge.serving.app import PUBLIC, ModelCalls, create_app
from dglkge.serving.explorer import Explorer

TOKEN = "correct-horse-battery"
ROLES = ("head", "relation", "tail")
LINK = {"head": "person3", "relation": "lives_in", "tail": "town4"}
QUERY = {"head": "person3", "relation": "lives_in"}
NEW = {"head": "Ann", "relation": "lives_in", "tail": "town4"}


@pytest.fixture(scope="module")
def explorer(run):
    return Explorer(run)


@pytest.fixture(scope="module")
def calls():
    calls = ModelCalls(1)
    yield calls
    calls.close()


def client_of(explorer, calls, token=None, **options):
    app = create_app(explorer, calls, HostNames("127.0.0.1", True, ["graphs.example"]), token)
    return TestClient(app, base_url="http://127.0.0.1:1", **options)


@pytest.fixture(scope="module")
def client(explorer, calls):
    return client_of(explorer, calls)


def error_of(answer, status: int) -> str:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (text,) = answer.json().values()
    assert list(answer.json()) == ["error"] and "\n" not in text
    return text


def checked(path, answer) -> dict:
    """The content of an answer, which its description in OpenAPI fits."""
    schema = getattr(app_module, f"{path.removeprefix('/').capitalize()}Response")
    schema.model_validate(answer.json(), strict=True)
    return answer.json()


def post(client, path, **body) -> dict:
    return checked(path, client.post(path, json=body))


def get(client, path, **parameters) -> dict:
    return checked(path, client.get(path, params=parameters))


def named(dataset, triple) -> dict[str, str]:
    return dict(zip(ROLES, names_of(dataset, triple)))


def test_missing_triples_reasons_and_numbers_are_those_of_the_run(client, run):
    body = {"heads": ["person3", IMAGE], "k": 3, "limit": 10}
    triples = post(client, "/complete", **body)["triples"]
    expected = run.complete(**body)[[*ROLES]].values.tolist()
    assert len(triples) == 10 and [[row[role] for role in ROLES] for row in triples] == expected
    assert post(client, "/explain", **LINK, k=3) == run.explain(**LINK, k=3)
    values = {name: float(number) for number, name in enumerate(run.tables.vocabulary("person").names[:12])}
    content = post(client, "/attributes", values=values, k=3, least=True, known=True)
    frame = run.predict_numbers(values)
    assert [row["entity"] for row in content["entities"]] == frame["entity"].tolist()[:-4:-1]
    assert (content["r2"], content["mean_error"]) == (frame.attrs["r2"], frame.attrs["mean_error"])
    entities = post(client, "/attributes", values=values, k=2)["entities"]
    assert [row["entity"] for row in entities] == frame["entity"][frame["known"].isna()].tolist()[:2]
    assert {row["known"] for row in entities} == {None}


def test_a_new_entity_is_that_of_its_triples(client, run):
    facts = [NEW, {"head": "Ann", "relation": SCRIPT, "tail": IMAGE}]
    queries = [{"head": "Ann", "relation": "lives_in"}, {"relation": SCRIPT, "tail": "Ann"}]
    content = post(client, "/unseen", name="Ann", triples=facts, queries=queries, k=4)
    expected = run.add_entities(pd.DataFrame(facts))
    assert (content["entity"], content["type"]) == ("Ann", "person")
    near = expected.similar("Ann", 4)["entity"].tolist()
    assert [neighbour["name"] for neighbour in content["similar"]] == near
    towns, people = (result["answers"] for result in content["results"])
    frame = expected.predict_tails("Ann", "lives_in", 4)
    assert [answer["tail"] for answer in towns] == frame["entity"].tolist()
    frame = expected.predict_heads(SCRIPT, "Ann", 4)
    assert [answer["head"] for answer in people] == frame["entity"].tolist()


def test_probabilities_of_a_calibrated_run(run_folder, calls, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    curve = calibrated(folder, 0.3, -0.1)
    client = client_of(Explorer(dglkge.open_run(folder)), calls)
    assert client.get("/model").json()["probabilities"] is True
    answers = post(client, "/predict", queries=[QUERY])["results"][0]["answers"]
    expected = curve(np.array([answer["score"] for answer in answers]))
    assert [answer["probability"] for answer in answers] == pytest.approx(expected.tolist(), rel=1e-12)


def test_predictions_are_those_of_the_run(client, run):
    queries = [
        {"head": IMAGE, "relation": SCRIPT},
        {"relation": "lives_in", "tail": ODD},
        {"head": "person3", "tail": "town4"},
        {"head": "nobody", "relation": "lives_in"},
        {"head": "person3"},
    ]
    results = post(client, "/predict", queries=queries, k=7, known="mark")["results"]
    expected_answers = run.predict(pd.DataFrame(queries).astype(object), 7, "mark")
    assert len(results) == len(queries)
    for place, result in enumerate(results):
        rows = expected_answers[expected_answers["query"] == place]
        if result["problem"] is not None:
            assert [result["problem"]] == rows["problem"].tolist() and not result["answers"]
            continue
        assert len(result["answers"]) == len(rows) > 0 and rows["problem"].isna().all()
        for name in ("rank", *ROLES, "score", "known_from"):
            assert [answer[name] for answer in result["answers"]] == rows[name].tolist(), name
        assert {answer["probability"] for answer in result["answers"]} == {None}
        assert result["type"] == rows["type"].iloc[0] and result["missing"] == rows["missing"].iloc[0]
    assert "unknown entity 'nobody'" in results[3]["problem"] and "has 1" in results[4]["problem"]
    for options in ({"candidates": "seen", "known": "mark", "k": 7}, {"known": "drop", "k": 100}):
        (result,) = post(client, "/predict", queries=queries[:1], **options)["results"]
        expected = run.predict_tails(IMAGE, SCRIPT, **options)["entity"].tolist()
        assert [answer["tail"] for answer in result["answers"]] == expected and len(expected) < 40


def test_scores_and_similar_entities_are_those_of_the_run(client, run, hostile_dataset):
    known = named(hostile_dataset, hostile_dataset.split("test")[0])
    triples = [known, {"head": "nobody", "relation": SCRIPT, "tail": IMAGE}]
    expected = run.score(pd.DataFrame(triples))
    first, second = post(client, "/score", triples=triples)["triples"]
    nothing = {"probability": None, "problem": None}
    assert first == {**known, "score": expected["score"][0], "known_from": "test", **nothing}
    assert second["score"] is None and second["problem"] == expected["problem"][1]
    content, expected = get(client, "/similar", entity=ODD, k=4), run.similar(ODD, 4)
    assert [neighbour["name"] for neighbour in content["similar"]] == expected["entity"].tolist()
    assert [neighbour["cosine"] for neighbour in content["similar"]] == expected["cosine"].tolist()
    assert (content["type"], content["method"]) == ("town", "exact")


@pytest.mark.parametrize("entity", [IMAGE, ODD, "country0"])
def test_known_triples_are_those_of_the_data_set(client, hostile_dataset, entity):
    content = get(client, "/triples", entity=entity, limit=1000)
    splits = {}
    for group in content["groups"]:
        assert group["count"] == len(group["others"]) > 0
        for other in group["others"]:
            ends = (entity, other["name"]) if group["role"] == "head" else (other["name"], entity)
            splits[(ends[0], group["relation"], ends[1])] = other["split"]
    expected: dict[tuple[str, ...], str] = {}
    for split in ("train", "valid", "test"):
        for triple in hostile_dataset.split(split):
            names = tuple(named(hostile_dataset, triple).values())
            if entity in (names[0], names[2]):
                expected.setdefault(names, split)  # the first of several
    assert splits == expected and content["triples"] == len(expected)
    counts = [group["count"] for group in content["groups"]]
    assert counts == sorted(counts, reverse=True)


def test_pages_of_known_triples(client):
    (group,) = get(client, "/triples", entity="country0", limit=1000)["groups"]
    parameters = {"entity": "country0", "relation": "lies_in", "role": "tail", "limit": 2, "offset": 1}
    (page,) = get(client, "/triples", **parameters)["groups"]
    assert page == {**group, "others": group["others"][1:3]} and group["count"] > 2
    assert get(client, "/triples", **{**parameters, "role": "head"})["groups"] == []


def test_names_and_relations(client, run, hostile_dataset):
    def entities(**parameters):
        return get(client, "/entities", k=1000, **parameters)["entities"]

    towns = get(client, "/entities", prefix="TOWN", k=3)["entities"]
    assert towns == [{"name": name, "type": "town"} for name in ("town0", "town2", "town3")]
    names = [name for type_ in run.tables.entity_types for name in run.tables.vocabulary(type_).names]
    everywhere = [entity["name"] for entity in entities(prefix="o", anywhere=True)]
    assert sorted(everywhere) == sorted(name for name in names if "o" in name.lower())
    assert entities(prefix="o") == []
    counts = Counter()  # without a text, those with most training triples come first
    for triple in hostile_dataset.split("train"):
        head, _, tail = named(hostile_dataset, triple).values()
        counts.update([head, tail])
    first = [entity["name"] for entity in entities()]
    numbers = [counts[name] for name in first]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 3
    assert sorted(first) == sorted(names)
    assert {entity["type"] for entity in entities(type="country")} == {"country"}
    triples = np.concatenate([hostile_dataset.split(split) for split in ("train", "valid", "test")])
    for id_, facts in enumerate(get(client, "/relations")["relations"]):
        relation = hostile_dataset.relations[id_]
        types = {"head_type": relation.lhs, "tail_type": relation.rhs}
        label = {"relation": hostile_dataset.relations.labels[id_], "name": relation.name}
        assert facts == {**label, **types, "triples": int((triples[:, 1] == id_).sum())}


@pytest.mark.parametrize(
    "path, body, status, text",
    [
        ("/similar?entity=persn1&type=person", None, 404, "unknown entity 'persn1'; did you mean 'person1"),
        ("/similar?entity=x", None, 404, "no entity of any type is called 'x'"),
        ("/similar?entity=town2&k=1001", None, 422, "k: Input should be less than or equal to 1000, got '10"),
        ("/similar", None, 422, "entity: Field required"),
        (f"/entities?prefix={'x' * 10_001}", None, 422, "prefix: String should have at most 10000"),
        ("/triples?entity=town2&role=middle", None, 422, "role: Input should be 'head' or 'tail', got 'mid"),
        ("/nowhere", None, 404, "there is no '/nowhere'; there are /ask, /attributes, /complete,"),
        ("/docs", None, 404, "there is no '/docs'"),
        ("/page/../../app.py", None, 404, "there is no"),
        ("/predict", None, 405, "/predict is not asked with GET"),
        ("/predict", {"queries": []}, 422, "queries: List should have at least 1 item"),
        ("/predict", {"queries": [QUERY] * 1001}, 422, "queries: List should have at most 1000 items"),
        ("/predict", {"queries": [QUERY] * 101, "k": 1000}, 400, "for 101000 answers; allowed: 100000"),
        ("/predict", {"queries": [{**QUERY, "tale": "x"}]}, 422, "queries.0.tale: Extra inputs are not perm"),
        ("/predict", {"queries": [QUERY], "known": "hide"}, 422, "known: Input should be 'mark', 'drop' or"),
        ("/predict", [], 422, "body: "),
        ("/score", {"triples": [LINK] * 10_001}, 422, "at most 10000 items"),
        ("/complete", {"heads": ["person3"]}, 400, "fit probabilities"),
        ("/ask", {"question": "(a, b, c)"}, 400, "begins with a variable"),
        ("/attributes", {"values": {"nobody": 1.0}}, 400, "1 entities have a value; at least 10 are needed"),
        ("/explain", {**LINK, "head": "nobody"}, 400, "nobody"),
        ("/unseen", {"name": "Ann"}, 400, "give one of text, vector and triples"),
        ("/unseen", {"name": "Ann", "triples": [NEW], "type": "town"}, 400, "triples give the new entity "),
        ("/unseen", {"name": "Ann", "text": "a"}, 400, "trained without features"),
        ("/unseen", {"name": "person3", "triples": [NEW]}, 400, "the entity 'person3' is known already"),
        ("/unseen", {"name": "Bob", "triples": [NEW]}, 400, "no triple has the new entity 'Bob'"),
    ],
)
def test_mistakes(client, path, body, status, text):
    answer = client.get(path) if body is None else client.post(path, json=body)
    assert text in error_of(answer, status)


def test_bodies_of_other_sizes_and_types(client):
    def send(content, content_type="application/json"):
        return client.post("/score", content=content, headers={"content-type": content_type})

    large = b" " * (MAX_BODY_BYTES + 1)
    assert "more than 1048576 bytes" in error_of(send(large), 413)
    # without a length, in pieces
    pieces = send(large[:100_000] for _ in range(11))
    assert "more than 1048576 bytes" in error_of(pieces, 413)
    assert pieces.headers["connection"] == "close"  # the rest is not read
    assert "not JSON" in error_of(send(b'{"triples": [}'), 400)
    for body in (b'{"triples": "\xff"}', b"[" * 200_000, b'{"triples": ' + b"1" * 5000 + b"}"):
        assert "parsing the body" in error_of(send(body), 400)
    words = "Content-Type: got 'text/plain'; allowed: application/json"
    assert words in error_of(send(b"{}", "text/plain"), 415)
    fits = json.dumps({"triples": [LINK]}).encode()
    assert send(fits + b" " * (MAX_BODY_BYTES - len(fits))).status_code == 200


ALLOWED = ("127.0.0.1:1", "LOCALHOST:80", "[::1]:9", "graphs.example:443")
REFUSED = ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "10.0.0.1", "", "[::1")


def test_host_header(client):
    for path in ("/", "/model"):
        for host in ALLOWED:
            assert client.get(path, headers={"host": host}).status_code == 200, host
        for host in REFUSED:
            assert "Host header: got " in error_of(client.get(path, headers={"host": host}), 400), host
    answer = client.get("/model", headers=[("host", "127.0.0.1"), ("host", "localhost")])
    assert error_of(answer, 400).startswith("Host header: got '127.0.0.1, localhost'; allowed: ")
    # Where other machines may ask, an address is allowed.
    assert HostNames("0.0.0.0", False).allows("10.0.0.1:80")
    assert not HostNames("0.0.0.0", False).allows("evil.example")


def test_pages_of_other_sites_get_nothing(client):
    for site in ("cross-site", "same-site"):
        answer = client.get("/model", headers={"sec-fetch-site": site})
        assert "pages of other sites" in error_of(answer, 403)
        assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200  # a link leads here
    for site in ("same-origin", "none"):
        assert client.get("/model", headers={"sec-fetch-site": site}).status_code == 200
    origin = {"origin": "http://evil.example"}
    assert client.options("/model", headers=origin).status_code >= 400
    answer = client.get("/model", headers=origin)
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_token(explorer, calls):
    assert len(TOKEN) >= MIN_TOKEN_LENGTH
    client = client_of(explorer, calls, TOKEN)
    for path in PUBLIC:
        assert client.get(path).status_code == 200
    assert get(client, "/health")["needs_token"] is True
    paths = {path for path in client.get("/openapi.json").json()["paths"] if path != "/health"}
    assert paths >= {"/predict", "/score", "/similar", "/entities", "/relations", "/triples", "/model"}
    for path in [*paths, "/nowhere"]:
        for method in ("GET", "POST"):
            answer = client.request(method, path)
            assert "a token is needed" in error_of(answer, 401)
            assert answer.headers["www-authenticate"] == "Bearer"

    def ask(value):
        return client.get("/model", headers={"authorization": value.encode("latin-1")})

    for value in (f"{TOKEN}x", TOKEN[:-1], "", "\xe9" + TOKEN, TOKEN.upper()):
        assert error_of(ask(f"Bearer {value}"), 401) == "the token is wrong"
    assert "a token is needed" in error_of(ask(f"Basic {TOKEN}"), 401)
    for scheme in ("Bearer", "bearer"):
        answer = ask(f"{scheme} {TOKEN}")
        assert answer.status_code == 200 and answer.json()["relations"] == len(explorer.relations)


def test_page_and_headers(client):
    page = client.get("/?at=%3Cscript%3E")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    for path in ("/", "/explorer.js", "/explorer.css"):
        answer = client.get(path)
        # nothing from elsewhere; the one address is the namespace of a picture
        assert "//" not in answer.text.replace("// ", "") and "innerHTML" not in answer.text
    assert page.text.count("<script") == 1 and "style=" not in page.text and " on" not in page.text
    responses = [client.get("/model"), client.get("/nowhere"), client.get("/model", headers={"host": "x"})]
    for answer in (page, *responses):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store" and "server" not in answer.headers
    # A browser gets a page for an address that does not exist.
    answer = client.get("/nowhere<b>", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/html")
    assert '<a href="/">' in answer.text and "nowhere" not in answer.text


def toy_client(folder, calls, meta, tables, names=None):
    toy.save_toy(folder / "checkpoint", meta, tables, 1, names)
    return client_of(Explorer(dglkge.open_run(folder)), calls)


def test_a_run_without_a_data_set_whose_types_share_names(calls, tmp_path, caplog):
    meta = toy.toy_meta(relations=toy.TWO_PAIRS)
    counts = meta.entity_types.items()
    names = {type_: Vocabulary([f"n{id_}" for id_ in range(count)], "entity") for type_, count in counts}
    client = toy_client(tmp_path, calls, meta, toy.toy_tables(meta, finite=True), names)
    assert "/nowhere/toy is not there" in client.get("/model").json()["no_triples"]
    assert "known triples are not available" in error_of(client.get("/triples?entity=n1&type=film"), 400)
    assert {relation["triples"] for relation in get(client, "/relations")["relations"]} == {None}
    text = error_of(client.get("/similar?entity=n1"), 400)
    assert text == "'n1' is the name of entities of several types: person, film; say which by the type"
    assert len(get(client, "/similar", entity="n1", type="film")["similar"]) == 4
    queries = [{"head": "n1", "relation": "made"}]
    (result,) = post(client, "/predict", queries=queries)["results"]
    assert len(result["answers"]) == 5 and {answer["known_from"] for answer in result["answers"]} == {None}
    answer = client.post("/predict", json={"queries": queries, "known": "drop"})
    assert "is not there" in error_of(answer, 400)
    both = get(client, "/entities", prefix="n1", k=2)["entities"]
    assert both == [{"name": "n1", "type": "person"}, {"name": "n1", "type": "film"}]
    assert not caplog.records


def test_rows_that_are_no_numbers(calls, tmp_path):
    """NaN and infinity are null: JSON has neither."""
    meta = toy.toy_meta()
    tables = toy.toy_tables(meta)
    tables["person"].rows[:] = torch.nan
    tables["person"].rows[-5:] = torch.inf
    client = toy_client(tmp_path, calls, meta, tables)
    similar = get(client, "/similar", entity="person-1", k=3)["similar"]
    assert [neighbour["cosine"] for neighbour in similar] == [None] * 3
    queries = [{"head": "person-1", "relation": "likes"}]
    (result,) = post(client, "/predict", queries=queries, k=3)["results"]
    assert [answer["score"] for answer in result["answers"]] == [None] * 3


@pytest.mark.parametrize(
    "error, status, text",
    [
        (RuntimeError("a secret of the machine"), 500, "internal error; the server's log has the details"),
        (app_module.BusyError(), 503, "more than 64 requests wait for the model; try again later"),
    ],
)
def test_failures_are_not_shown_and_a_full_queue_is(explorer, calls, monkeypatch, error, status, text):
    monkeypatch.setattr(explorer, "similar", mock.Mock(side_effect=error))
    answer = client_of(explorer, calls, raise_server_exceptions=False).get("/similar?entity=town2")
    assert error_of(answer, status) == text
    assert answer.headers.get("retry-after") == ("1" if status == 503 else None)


class SlowCall:
    """A call of the model that runs until it is told to go on."""

    def __init__(self):
        self.begun, self.go_on, self.computed = threading.Event(), threading.Event(), []

    def __call__(self, entity="", *_arguments):
        self.computed.append(entity)
        self.begun.set()
        assert self.go_on.wait(60)
        return {"entity": entity, "thread": threading.current_thread().name}

    async def has_begun(self):
        await asyncio.get_running_loop().run_in_executor(None, self.begun.wait)


def test_full_queue_and_end(monkeypatch):
    """One call runs at a time; what the queue cannot hold is refused; the end waits for no call."""
    monkeypatch.setattr(app_module, "MAX_WAITING", 2)
    calls, slow = ModelCalls(1), SlowCall()

    async def ask():
        waiting = [asyncio.ensure_future(calls.run(slow)) for _ in range(2)]
        await slow.has_begun()
        with pytest.raises(app_module.BusyError):
            await calls.run(slow)
        slow.go_on.set()
        assert len({answer["thread"] for answer in await asyncio.gather(*waiting)}) == 1
        slow.begun.clear()
        slow.go_on.clear()
        running = asyncio.ensure_future(calls.run(slow))
        await slow.has_begun()
        assert calls.close()
        slow.go_on.set()
        await running

    asyncio.run(ask())
    assert not calls.close()


def test_requests_of_clients_that_left_are_not_computed(explorer, monkeypatch):
    calls, slow, statuses = ModelCalls(1), SlowCall(), []
    app = create_app(explorer, calls, HostNames("127.0.0.1", True))
    monkeypatch.setattr(explorer, "similar", slow)

    async def ask(entity: str, leaves: asyncio.Event) -> None:
        query, headers = f"entity={entity}".encode(), [(b"host", b"127.0.0.1")]
        scope = {"type": "http", "method": "GET", "path": "/similar", "query_string": query}

        async def receive():
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            statuses.append((entity, message.get("status")))

        await app({**scope, "headers": headers}, receive, send)

    async def ask_all():
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.ensure_future(ask("a", stays))
        await slow.has_begun()
        leaving = [asyncio.ensure_future(ask("b", leaves)) for _ in range(10)]
        last = asyncio.ensure_future(ask("c", stays))
        leaves.set()
        await asyncio.gather(*leaving)
        slow.go_on.set()
        await asyncio.gather(first, last)

    try:
        asyncio.run(asyncio.wait_for(ask_all(), 60))
    finally:
        slow.go_on.set()
        calls.close()
    assert slow.computed == ["a", "c"]
    assert [entity for entity, status in statuses if status == 200] == ["a", "c"]
