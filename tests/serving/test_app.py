"""REST against the Python interface of the run."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch

import dglkge
from dglkge.data import dataset as dataset_module
from dglkge.data.dataset import Dataset
from dglkge.data.vocabulary import Vocabulary
from dglkge.serving.server import MAX_BODY_BYTES, MIN_TOKEN_LENGTH, HostNames
from tests.checkpoint import toy_checkpoint as toy
from tests.checkpoint.toy_checkpoint import calibrated, toy_meta, toy_tables
from tests.serving.conftest import IMAGE, ODD, SCRIPT

pytest.importorskip("fastapi", reason="FastAPI is not installed")
pytest.importorskip("httpx", reason="httpx, which FastAPI's TestClient needs, is not installed")

from fastapi.testclient import TestClient

from dglkge.serving import app as app_module
from dglkge.serving.app import PUBLIC, ModelCalls, create_app
from dglkge.serving.explorer import Explorer

TOKEN = "correct-horse-battery"


@pytest.fixture(scope="module")
def run(run_folder):
    return dglkge.open_run(run_folder)


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
    """The text of a refusal, which is JSON and one line."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    (text,) = answer.json().values()
    assert list(answer.json()) == ["error"] and "\n" not in text
    return text


def check_schema(name: str, content) -> None:
    getattr(app_module, name).model_validate(content, strict=True)


def named(dataset, triple) -> dict[str, str]:
    head, relation, tail = (int(id_) for id_ in triple)
    pair = dataset.relations[relation]
    return {
        "head": dataset.vocabulary(pair.lhs)[head],
        "relation": dataset.relations.labels[relation],
        "tail": dataset.vocabulary(pair.rhs)[tail],
    }


def predictions(client, queries, **options):
    return client.post("/predict", json={"queries": queries, **options}).json()["results"]


def test_missing_triples_are_those_of_the_run(client, run):
    body = {"heads": ["person3", IMAGE], "k": 3, "limit": 10}
    content = client.post("/complete", json=body).json()["triples"]
    names = ["head", "relation", "tail"]
    expected = run.complete(**body)[names].values.tolist()
    assert len(content) == 10 and [[row[name] for name in names] for row in content] == expected


@pytest.mark.parametrize(
    "path, body, text",
    [
        ("/complete", {"heads": ["person3"]}, "fit probabilities"),
        ("/ask", {"question": "?x : (person3, lives_in, ?x)"}, "fit probabilities"),
        ("/ask", {"question": "(a, b, c)"}, "begins with a variable"),
        ("/attributes", {"values": {"nobody": 1.0}}, "1 entities have a value; at least 10 are needed"),
        ("/explain", {"head": "nobody", "relation": "lives_in", "tail": "town4"}, "nobody"),
    ],
)
def test_questions_that_have_no_answer(client, path, body, text):
    assert text in error_of(client.post(path, json=body), 400)


def test_numbers_are_those_of_the_run(client, run):
    names = run.tables.vocabulary("person").names
    values = {name: float(number) for number, name in enumerate(names[:12])}
    body = {"values": values, "k": 3, "least": True, "known": True}
    content = client.post("/attributes", json=body).json()
    check_schema("AttributesResponse", content)
    expected = run.predict_numbers(values)
    assert [row["entity"] for row in content["entities"]] == expected["entity"].tolist()[:-4:-1]
    assert (content["r2"], content["mean_error"]) == (expected.attrs["r2"], expected.attrs["mean_error"])
    entities = client.post("/attributes", json={"values": values, "k": 2}).json()["entities"]
    assert [row["entity"] for row in entities] == expected["entity"][expected["known"].isna()].tolist()[:2]
    assert {row["known"] for row in entities} == {None}


def test_a_new_entity_is_that_of_its_triples(client, run):
    facts = [
        {"head": "Ann", "relation": "lives_in", "tail": "town4"},
        {"head": "Ann", "relation": SCRIPT, "tail": IMAGE},
    ]
    queries = [{"head": "Ann", "relation": "lives_in"}, {"relation": SCRIPT, "tail": "Ann"}]
    content = client.post(
        "/unseen", json={"name": "Ann", "triples": facts, "queries": queries, "k": 4}
    ).json()
    check_schema("UnseenResponse", content)
    expected = run.add_entities(pd.DataFrame(facts))
    assert (content["entity"], content["type"]) == ("Ann", "person")
    assert [neighbour["name"] for neighbour in content["similar"]] == expected.similar("Ann", 4)[
        "entity"
    ].tolist()
    towns, people = (
        [answer[role] for answer in result["answers"]]
        for result, role in zip(content["results"], ("tail", "head"))
    )
    assert towns == expected.predict_tails("Ann", "lives_in", 4)["entity"].tolist()
    assert people == expected.predict_heads(SCRIPT, "Ann", 4)["entity"].tolist()
    for body, text in (
        ({}, "give one of text, vector and triples"),
        ({"text": "a", "triples": facts}, "give one of text, vector and triples"),
        ({"triples": facts, "type": "town"}, "triples give the new entity its type"),
        ({"text": "a"}, "trained without features"),
        ({"vector": [1.0]}, "trained without features"),
        ({"name": "person3", "triples": facts}, "the entity 'person3' is known already"),
        ({"triples": [{**facts[0], "head": "Bob"}]}, "no entity of any type is called 'Ann'"),
    ):
        status = 404 if "no entity" in text else 400
        assert text in error_of(client.post("/unseen", json={"name": "Ann", **body}), status)


def test_new_entities_open_nothing_again_and_keep_rules(run_folder, tmp_path, calls, monkeypatch):
    run = dglkge.open_run(shutil.copytree(run_folder, tmp_path / "run")).with_rules()
    facts = [{"head": "Ann", "relation": "lives_in", "tail": "town4"}]
    expected = run.add_entities(pd.DataFrame(facts)).predict_tails("Ann", "near", 9)["score"].tolist()
    client = client_of(Explorer(run), calls)
    monkeypatch.setattr(Dataset, "open", None)
    monkeypatch.setattr(dataset_module, "open_known_index", None)
    body = {"name": "Ann", "triples": facts, "queries": [{"head": "Ann", "relation": "near"}], "k": 9}
    (result,) = client.post("/unseen", json=body).json()["results"]
    assert [answer["score"] for answer in result["answers"]] == expected


def test_reasons_are_those_of_the_run(client, run):
    body = {"head": "person3", "relation": "lives_in", "tail": "town4", "k": 3}
    content = client.post("/explain", json=body).json()
    check_schema("ExplainResponse", content)
    assert content == run.explain(**body)


def test_predictions_are_those_of_the_run(client, run):
    queries = [
        {"head": IMAGE, "relation": SCRIPT},
        {"relation": "lives_in", "tail": ODD},
        {"head": "person3", "tail": "town4"},
        {"head": "nobody", "relation": "lives_in"},
        {"head": "person3"},
    ]
    body = {"queries": queries, "k": 7, "known": "mark"}
    content = client.post("/predict", json=body).json()
    check_schema("PredictResponse", content)
    expected_answers = run.predict(pd.DataFrame(queries).astype(object), 7, "mark")
    assert len(content["results"]) == len(queries)
    for place, result in enumerate(content["results"]):
        rows = expected_answers[expected_answers["query"] == place]
        if result["problem"] is not None:
            assert [result["problem"]] == rows["problem"].tolist() and not result["answers"]
            continue
        assert len(result["answers"]) == len(rows) > 0 and rows["problem"].isna().all()
        for name in ("rank", "head", "relation", "tail", "score", "known_from"):
            assert [answer[name] for answer in result["answers"]] == rows[name].tolist(), name
        assert {answer["probability"] for answer in result["answers"]} == {None}
        assert result["type"] == rows["type"].iloc[0] and result["missing"] == rows["missing"].iloc[0]
    assert "unknown entity 'nobody'" in content["results"][3]["problem"]
    assert "has 1" in content["results"][4]["problem"]
    for options in ({"candidates": "seen", "known": "mark"}, {"known": "drop", "k": 100}):
        (result,) = predictions(client, queries[:1], **{"k": 7, **options})
        expected = run.predict_tails(IMAGE, SCRIPT, **{"k": 7, **options})["entity"].tolist()
        assert [answer["tail"] for answer in result["answers"]] == expected and len(expected) < 40


def test_scores_are_those_of_the_run(client, run, hostile_dataset):
    known = named(hostile_dataset, hostile_dataset.split("test")[0])
    triples = [known, {"head": "nobody", "relation": SCRIPT, "tail": IMAGE}]
    content = client.post("/score", json={"triples": triples}).json()
    check_schema("ScoreResponse", content)
    expected = run.score(pd.DataFrame(triples))
    first, second = content["triples"]
    assert first == {
        **known, "score": expected["score"][0], "probability": None, "known_from": "test", "problem": None,
    }  # fmt: skip
    assert second["score"] is None and second["problem"] == expected["problem"][1]


def test_similar_entities_are_those_of_the_run(client, run):
    content = client.get("/similar", params={"entity": ODD, "k": 4}).json()
    check_schema("SimilarResponse", content)
    expected = run.similar(ODD, 4)
    assert [neighbour["name"] for neighbour in content["similar"]] == expected["entity"].tolist()
    assert [neighbour["cosine"] for neighbour in content["similar"]] == expected["cosine"].tolist()
    assert (content["type"], content["method"]) == ("town", "exact")
    assert "unknown" in error_of(client.get("/similar?entity=persn1&type=person"), 404)
    assert "person1" in error_of(client.get("/similar?entity=persn1&type=person"), 404)
    assert "no entity of any type is called 'x'" in error_of(client.get("/similar?entity=x"), 404)
    assert "unknown entity type 'x'" in error_of(client.get("/similar?entity=town2&type=x"), 400)


@pytest.mark.parametrize("entity", [IMAGE, ODD, "country0"])
def test_known_triples_are_those_of_the_data_set(client, hostile_dataset, entity):
    content = client.get("/triples", params={"entity": entity, "limit": 1000}).json()
    check_schema("TriplesResponse", content)
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
    whole = client.get("/triples?entity=country0&limit=1000").json()
    (group,) = whole["groups"]
    assert (group["relation"], group["role"]) == ("lies_in", "tail") and group["count"] > 2
    parameters = {"entity": "country0", "relation": "lies_in", "role": "tail", "limit": 2, "offset": 1}
    (page,) = client.get("/triples", params=parameters).json()["groups"]
    assert page == {**group, "others": group["others"][1:3]}
    assert client.get("/triples", params={**parameters, "role": "head"}).json()["groups"] == []
    assert "unknown relation" in error_of(client.get("/triples?entity=country0&relation=x"), 400)


def test_names_and_relations(client, run, hostile_dataset):
    content = client.get("/entities?prefix=TOWN&k=3").json()
    check_schema("EntitiesResponse", content)
    assert content["entities"] == [{"name": name, "type": "town"} for name in ("town0", "town2", "town3")]
    everywhere = client.get("/entities?prefix=o&k=1000&anywhere=true").json()["entities"]
    names = [name for type_ in run.tables.entity_types for name in run.tables.vocabulary(type_).names]
    assert sorted(entity["name"] for entity in everywhere) == sorted(
        name for name in names if "o" in name.lower()
    )
    assert client.get("/entities?prefix=o&k=1000").json()["entities"] == []
    first = client.get("/entities?k=1000").json()["entities"]
    counts = Counter()  # without a text, those with most training triples come first
    for triple in hostile_dataset.split("train"):
        names_of_triple = named(hostile_dataset, triple)
        counts.update([names_of_triple["head"], names_of_triple["tail"]])
    numbers = [counts[entity["name"]] for entity in first]
    assert numbers == sorted(numbers, reverse=True) and len(set(numbers)) > 3
    assert sorted(entity["name"] for entity in first) == sorted(names)
    countries = client.get("/entities?type=country&k=1000").json()["entities"]
    assert {entity["type"] for entity in countries} == {"country"}
    content = client.get("/relations").json()
    check_schema("RelationsResponse", content)
    triples = np.concatenate([hostile_dataset.split(split) for split in ("train", "valid", "test")])
    for id_, facts in enumerate(content["relations"]):
        relation = hostile_dataset.relations[id_]
        assert facts == {
            "relation": hostile_dataset.relations.labels[id_],
            "name": relation.name,
            "head_type": relation.lhs,
            "tail_type": relation.rhs,
            "triples": int((triples[:, 1] == id_).sum()),
        }


@pytest.mark.parametrize(
    "path, status, text",
    [
        ("/similar?entity=town2&k=1001", 422, "k: Input should be less than or equal to 1000, got '1001'"),
        ("/similar", 422, "entity: Field required"),
        ("/entities?k=many", 422, "k: Input should be a valid integer"),
        (f"/entities?prefix={'x' * 10_001}", 422, "prefix: String should have at most 10000 characters"),
        ("/triples?entity=town2&role=middle", 422, "role: Input should be 'head' or 'tail', got 'middle'"),
        ("/triples?entity=town2&offset=-1", 422, "offset:"),
        ("/nowhere", 404, "there is no '/nowhere'; there are /ask, /attributes, /complete,"),
        ("/docs", 404, "there is no '/docs'"),
        ("/page/../../app.py", 404, "there is no"),
        ("/predict", 405, "/predict is not asked with GET"),
    ],
)
def test_bad_parameters(client, path, status, text):
    assert text in error_of(client.get(path), status)


QUERY = {"head": "person3", "relation": "lives_in"}


@pytest.mark.parametrize(
    "body, status, text",
    [
        ({"queries": []}, 422, "queries: List should have at least 1 item"),
        ({"queries": [QUERY] * 1001}, 422, "queries: List should have at most 1000 items"),
        ({"queries": [QUERY] * 101, "k": 1000}, 400, "ask for 101000 answers; allowed: 100000"),
        ({"queries": [QUERY], "k": 1001}, 422, "k: Input should be less than or equal to 1000"),
        ({"queries": [{**QUERY, "tale": "x"}]}, 422, "queries.0.tale: Extra inputs are not permitted"),
        ({"queries": [{"head": 3}]}, 422, "queries.0.head: Input should be a valid string, got 3"),
        ({"queries": [QUERY], "known": "hide"}, 422, "known: Input should be 'mark', 'drop' or 'keep'"),
        ([], 422, "body: "),
    ],
)
def test_bad_bodies(client, body, status, text):
    assert text in error_of(client.post("/predict", json=body), status)


def test_bodies_of_other_sizes_and_types(client):
    json_type = {"content-type": "application/json"}
    large = b" " * (MAX_BODY_BYTES + 1)
    assert "more than 1048576 bytes" in error_of(client.post("/score", content=large, headers=json_type), 413)
    # without a length, in pieces
    pieces = client.post("/score", content=(large[:100_000] for _ in range(11)), headers=json_type)
    assert "more than 1048576 bytes" in error_of(pieces, 413)
    assert pieces.headers["connection"] == "close"  # the rest is not read
    assert "not JSON" in error_of(client.post("/score", content=b'{"triples": [}', headers=json_type), 400)
    for body in (b'{"triples": "\xff"}', b"[" * 200_000, b'{"triples": ' + b"1" * 5000 + b"}"):
        assert "parsing the body" in error_of(client.post("/score", content=body, headers=json_type), 400)
    text = client.post("/score", content=b"{}", headers={"content-type": "text/plain"})
    assert "Content-Type: got 'text/plain'; allowed: application/json" in error_of(text, 415)
    fits = json.dumps({"triples": [{"head": "a", "relation": "b", "tail": "c"}]}).encode()
    fits += b" " * (MAX_BODY_BYTES - len(fits))
    assert client.post("/score", content=fits, headers=json_type).status_code == 200
    many = {"triples": [{"head": "a", "relation": "b", "tail": "c"}] * 10_001}
    assert "at most 10000 items" in error_of(client.post("/score", json=many), 422)


@pytest.mark.parametrize(
    "host, is_allowed",
    [
        ("127.0.0.1:1", True),
        ("LOCALHOST:80", True),
        ("[::1]:9", True),
        ("graphs.example:443", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("10.0.0.1", False),
        ("", False),
        ("[::1", False),
    ],
)
def test_host_header(client, host, is_allowed):
    for path in ("/", "/model"):
        answer = client.get(path, headers={"host": host})
        if is_allowed:
            assert answer.status_code == 200
        else:
            assert error_of(answer, 400).startswith("Host header: got ")


def test_two_host_headers_are_refused_and_addresses_allowed_where_others_may_ask(client):
    answer = client.get("/model", headers=[("host", "127.0.0.1"), ("host", "localhost")])
    assert error_of(answer, 400).startswith("Host header: got '127.0.0.1, localhost'; allowed: ")
    assert HostNames("0.0.0.0", False).allows("10.0.0.1:80")
    assert not HostNames("0.0.0.0", False).allows("evil.example")


def test_pages_of_other_sites_get_nothing(client):
    for site in ("cross-site", "same-site"):
        answer = client.get("/model", headers={"sec-fetch-site": site})
        assert "pages of other sites" in error_of(answer, 403)
        assert client.get("/", headers={"sec-fetch-site": site}).status_code == 200  # a link leads here
    for site in ("same-origin", "none"):
        assert client.get("/model", headers={"sec-fetch-site": site}).status_code == 200
    answer = client.options("/model", headers={"origin": "http://evil.example"})
    assert answer.status_code >= 400
    answer = client.get("/model", headers={"origin": "http://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_token(explorer, calls):
    assert len(TOKEN) >= MIN_TOKEN_LENGTH
    client = client_of(explorer, calls, TOKEN)
    for path in PUBLIC:
        assert client.get(path).status_code == 200
    assert client.get("/health").json()["needs_token"] is True
    described = client.get("/openapi.json").json()
    paths = {path for path in described["paths"] if path != "/health"}
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


def test_a_browser_gets_a_page_for_an_address_that_does_not_exist(client):
    answer = client.get("/nowhere<b>", headers={"accept": "text/html,*/*"})
    assert answer.status_code == 404 and answer.headers["content-type"].startswith("text/html")
    assert '<a href="/">' in answer.text and "nowhere" not in answer.text


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
    assert client.head("/health").status_code in (200, 405)


def test_probabilities_of_a_calibrated_run(run_folder, calls, tmp_path):
    folder = shutil.copytree(run_folder, tmp_path / "run")
    curve = calibrated(folder, 0.3, -0.1)
    client = client_of(Explorer(dglkge.open_run(folder)), calls)
    assert client.get("/model").json()["probabilities"] is True
    (result,) = predictions(client, [QUERY])
    for answer in result["answers"]:
        assert answer["probability"] == pytest.approx(float(curve(np.array([answer["score"]]))[0]), rel=1e-12)


def test_a_run_without_a_data_set_whose_types_share_names(calls, tmp_path, caplog):
    meta = toy_meta(relations=toy.TWO_PAIRS)
    tables = toy_tables(meta)
    for whole in tables.values():
        whole.rows.nan_to_num_(posinf=1.0)
    counts = meta.entity_types.items()
    names = {type_: Vocabulary([f"n{id_}" for id_ in range(count)], "entity") for type_, count in counts}
    toy.save_toy(tmp_path / "run" / "checkpoint", meta, tables, 1, names)
    explorer = Explorer(dglkge.open_run(tmp_path / "run"))
    client = client_of(explorer, calls)
    assert "/nowhere/toy is not there" in client.get("/model").json()["no_triples"]
    assert "known triples are not available" in error_of(client.get("/triples?entity=n1&type=film"), 400)
    assert {relation["triples"] for relation in client.get("/relations").json()["relations"]} == {None}
    text = error_of(client.get("/similar?entity=n1"), 400)
    assert text == "'n1' is the name of entities of several types: person, film; say which by the type"
    assert len(client.get("/similar?entity=n1&type=film").json()["similar"]) == 4
    (result,) = predictions(client, [{"head": "n1", "relation": "made"}])
    assert len(result["answers"]) == 5 and {answer["known_from"] for answer in result["answers"]} == {None}
    answer = client.post("/predict", json={"queries": [{"head": "n1", "relation": "made"}], "known": "drop"})
    assert "is not there" in error_of(answer, 400)
    both = client.get("/entities?prefix=n1&k=2").json()["entities"]
    assert both == [{"name": "n1", "type": "person"}, {"name": "n1", "type": "film"}]
    assert not caplog.records


def test_failures_are_not_shown(explorer, calls, monkeypatch):
    def fail(*_arguments):
        raise RuntimeError("a secret of the machine")

    monkeypatch.setattr(explorer, "similar", fail)
    client = client_of(explorer, calls, raise_server_exceptions=False)
    text = error_of(client.get("/similar?entity=town2"), 500)
    assert text == "internal error; the server's log has the details"


def test_full_queue(explorer, monkeypatch):
    """The model runs one call at a time; more than the queue holds are refused, and the rest is answered."""
    monkeypatch.setattr(app_module, "MAX_WAITING", 2)
    calls = ModelCalls(1)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(60)
        return threading.current_thread().name

    async def ask():
        waiting = [asyncio.ensure_future(calls.run(slow)) for _ in range(2)]
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        with pytest.raises(app_module.BusyError):
            await calls.run(slow)
        go_on.set()
        return await asyncio.gather(*waiting, return_exceptions=True)

    try:
        assert len(set(asyncio.run(ask()))) == 1
    finally:
        calls.close()

    async def refuse(*_arguments):
        raise app_module.BusyError

    monkeypatch.setattr(calls, "run", refuse)
    answer = client_of(explorer, calls).get("/similar?entity=town2")
    assert "try again later" in error_of(answer, 503) and answer.headers["retry-after"] == "1"


def test_requests_of_clients_that_left_are_not_computed(explorer, monkeypatch):
    calls = ModelCalls(1)
    app = create_app(explorer, calls, HostNames("127.0.0.1", True))
    begun, go_on, computed = threading.Event(), threading.Event(), []

    def similar(entity, *_arguments):
        computed.append(entity)
        begun.set()
        assert go_on.wait(60)
        return {"entity": entity}

    monkeypatch.setattr(explorer, "similar", similar)
    answers = []

    async def ask(entity: str, leaves: asyncio.Event) -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/similar",
            "query_string": f"entity={entity}".encode(),
            "headers": [(b"host", b"127.0.0.1")],
        }

        async def receive():
            await leaves.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            answers.append((entity, message))

        await app(scope, receive, send)

    async def ask_all():
        stays, leaves = asyncio.Event(), asyncio.Event()
        first = asyncio.ensure_future(ask("a", stays))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        leaving = [asyncio.ensure_future(ask("b", leaves)) for _ in range(10)]
        last = asyncio.ensure_future(ask("c", stays))
        leaves.set()
        await asyncio.gather(*leaving)
        go_on.set()
        await asyncio.gather(first, last)

    try:
        asyncio.run(asyncio.wait_for(ask_all(), 60))
    finally:
        go_on.set()
        calls.close()
    assert computed == ["a", "c"]
    assert [entity for entity, message in answers if message.get("status") == 200] == ["a", "c"]


def test_rows_that_are_no_numbers(calls, tmp_path):
    """NaN and infinity are null: JSON has neither."""
    meta = toy_meta()
    tables = toy_tables(meta)
    tables["person"].rows[:] = torch.nan
    tables["person"].rows[-5:] = torch.inf
    toy.save_toy(tmp_path / "run" / "checkpoint", meta, tables)
    client = client_of(Explorer(dglkge.open_run(tmp_path / "run")), calls)
    similar = client.get("/similar?entity=person-1&k=3").json()["similar"]
    assert [neighbour["cosine"] for neighbour in similar] == [None] * 3
    (result,) = predictions(client, [{"head": "person-1", "relation": "likes"}], k=3)
    assert [answer["score"] for answer in result["answers"]] == [None] * 3


def test_the_end_does_not_wait_for_a_call_of_the_model():
    calls = ModelCalls(1)
    begun, go_on = threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(60)

    async def ask():
        waiting = asyncio.ensure_future(calls.run(slow))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait)
        assert calls.close()
        go_on.set()
        await waiting

    asyncio.run(ask())
    assert not calls.close()
