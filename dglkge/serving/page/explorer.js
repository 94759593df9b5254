// The explorer's page. Its state is in the address: at, type and by of each step from the first entity to this one.
// Names are text that anybody may have written: they become text nodes and parameters only, never HTML.
"use strict";

const TOKEN_KEY = "dglkge-token";
const MAX_STEPS = 12;
const MATCHES = 12;
const ROWS = 20;
const PREDICTIONS = 10;
const OPENED = window.matchMedia("(max-width: 60rem)").matches ? 2 : 6;
const SHOWN_AT_A_TIME = 30;
const TYPING_MS = 120;

const byId = (id) => document.getElementById(id);
let model = null;
let relations = [];
let shown = new AbortController();

/** Create an element; children are nodes or texts. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// --- questions to the server

class Refused extends Error {}

async function ask(path, parameters = {}, body = null, signal = undefined) {
  const given = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined);
  const query = new URLSearchParams(given).toString();
  const headers = {};
  const token = sessionStorage.getItem(TOKEN_KEY);
  if (token) headers.Authorization = "Bearer " + token;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path + (query ? "?" + query : ""), {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
  });
  const answer = await response.json().catch((error) => {
    // The question may be ended while its answer is being read.
    if (error.name === "AbortError") throw error;
    throw new Refused("the server's answer is no JSON");
  });
  if (response.status === 401) {
    await askToken(answer.error);
    return ask(path, parameters, body, signal);
  }
  if (!response.ok) throw new Refused(answer.error);
  return answer;
}

let tokenAsked = null;

/** Show the dialog and wait until a token was entered; several questions share one dialog. */
function askToken(problem) {
  tokenAsked ??= new Promise((resolve) => {
    const dialog = byId("token-dialog");
    byId("token-problem").textContent = problem;
    byId("token").value = "";
    dialog.oncancel = (event) => event.preventDefault();
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      const value = byId("token").value.trim();
      if (!/^[!-~]+$/.test(value)) {
        byId("token-problem").textContent = "a token has ASCII letters, digits and signs only";
        return;
      }
      sessionStorage.setItem(TOKEN_KEY, value);
      dialog.close();
      tokenAsked = null;
      resolve();
    };
    if (!dialog.open) dialog.showModal();
  });
  return tokenAsked;
}

/** Take the token from the address and remove it there, so that it is neither copied nor in the history. */
function takeTokenFromAddress() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found === null) return;
  if (/^[!-~]+$/.test(found)) sessionStorage.setItem(TOKEN_KEY, found);
  history.replaceState(null, "", location.pathname + location.search);
}

// --- state in the address

function readState() {
  const parameters = new URLSearchParams(location.search);
  const types = parameters.getAll("type");
  const reasons = parameters.getAll("by");
  const steps = parameters.getAll("at").map((name, place) => ({
    name, type: types[place] || null, by: reasons[place] || "",
  }));
  return { steps, showKnown: parameters.get("known") === "show", showAll: parameters.get("candidates") === "all" };
}

function addressOf(steps, { showKnown, showAll }) {
  const parameters = new URLSearchParams();
  for (const step of steps.slice(-MAX_STEPS)) {
    parameters.append("at", step.name);
    parameters.append("type", step.type || "");
    parameters.append("by", step.by || "");
  }
  if (showKnown) parameters.set("known", "show");
  if (showAll) parameters.set("candidates", "all");
  const text = parameters.toString();
  return "/" + (text ? "?" + text : "");
}

function go(address) {
  if (address !== location.pathname + location.search) history.pushState(null, "", address);
  show(true);
}

/** A link that stays on the page; opened in a new tab it works as well. */
function link(text, address) {
  return make("a", { href: address, class: "name", onclick: (event) => follow(event, address) }, text);
}

/** Go to an address of the page after a plain click; with a key the browser opens a tab or a window. */
function follow(event, address) {
  if (event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  go(address);
}

/** A link from the current entity to another one. */
function stepLink(state, name, type, by) {
  return link(name, addressOf([...state.steps, { name, type, by }], state));
}

// --- search with completion

let matches = [];
let chosen = -1;
let typing = 0;
let searching = new AbortController();

function closeMatches() {
  clearTimeout(typing);
  searching.abort();
  matches = [];
  chosen = -1;
  byId("matches").hidden = true;
  byId("matches").setAttribute("aria-busy", "false");
  byId("query").setAttribute("aria-expanded", "false");
  byId("query").removeAttribute("aria-activedescendant");
}

function choose(place) {
  chosen = place;
  const options = byId("matches").querySelectorAll("[role=option]");
  options.forEach((option, number) => option.setAttribute("aria-selected", String(number === place)));
  if (place < 0) {
    byId("query").removeAttribute("aria-activedescendant");
    return;
  }
  byId("query").setAttribute("aria-activedescendant", "match-" + place);
  options[place].scrollIntoView({ block: "nearest" });
}

function open(match) {
  byId("query").value = "";
  closeMatches();
  go(addressOf([{ name: match.name, type: match.type, by: "" }], readState()));
}

async function complete() {
  searching.abort();
  searching = new AbortController();
  const prefix = byId("query").value;
  if (!prefix) {
    closeMatches();
    return;
  }
  try {
    const parameters = { prefix, k: MATCHES, anywhere: true };
    matches = (await ask("/entities", parameters, null, searching.signal)).entities;
  } catch (error) {
    if (error.name !== "AbortError") byId("status").textContent = error.message;
    return;
  }
  const severalTypes = Object.keys(model.entities).length > 1;
  byId("matches").replaceChildren(...matches.map((match, place) => make("li", {
    id: "match-" + place,
    role: "option",
    "aria-selected": "false",
    onmousedown: (event) => { event.preventDefault(); open(match); },
  }, make("span", { class: "name" }, match.name), severalTypes ? make("span", { class: "badge" }, match.type) : "")));
  if (!matches.length) byId("matches").append(make("li", { class: "none" }, "no entity has that in its name"));
  byId("matches").hidden = false;
  byId("matches").setAttribute("aria-busy", "false");
  byId("query").setAttribute("aria-expanded", "true");
  byId("status").textContent = matches.length + " entities found";
  choose(-1);
}

async function enter() {
  clearTimeout(typing);
  if (chosen < 0) await complete();
  const wanted = matches[chosen < 0 ? 0 : chosen];
  if (wanted) open(wanted);
}

function prepareSearch() {
  const query = byId("query");
  query.addEventListener("input", () => {
    // The list still answers what was typed before: nothing of it is chosen, and Enter asks again.
    choose(-1);
    byId("matches").setAttribute("aria-busy", "true");
    clearTimeout(typing);
    typing = setTimeout(complete, TYPING_MS);
  });
  query.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (!matches.length) { complete(); return; }
      const step = event.key === "ArrowDown" ? 1 : -1;
      choose(chosen < 0 && step < 0 ? matches.length - 1 : (chosen + step + matches.length) % matches.length);
    } else if (event.key === "Enter") {
      event.preventDefault();
      enter();
    } else if (event.key === "Escape") {
      closeMatches();
    }
  });
  query.addEventListener("blur", closeMatches);
  document.addEventListener("keydown", (event) => {
    const inField = /^(input|textarea|select)$/i.test(event.target.tagName);
    if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      query.focus();
    }
  });
}

// --- parts of the page

function showTrail(state) {
  if (!state.steps.length) {
    byId("trail").replaceChildren();
    return;
  }
  const items = state.steps.map((step, place) => {
    const by = step.by ? [make("span", { class: "by" }, step.by)] : [];
    if (place === state.steps.length - 1) {
      return make("li", {}, ...by, make("span", { "aria-current": "page", class: "name" }, step.name));
    }
    const steps = state.steps.slice(0, place + 1);
    return make("li", {}, ...by, link(step.name, addressOf(steps, state)));
  });
  byId("trail").replaceChildren(make("ol", {}, ...items));
}

/** Fill a section when a question is answered; its problem stands there otherwise. */
async function fill(section, work) {
  section.setAttribute("aria-busy", "true");
  try {
    section.append(...await work());
  } catch (error) {
    if (error.name === "AbortError") return;
    section.append(make("p", { class: "problem" }, error.message));
  }
  section.removeAttribute("aria-busy");
}

function row(anchor, text, share, badge) {
  const bar = make("span", { class: "bar", "aria-hidden": "true" });
  bar.style.width = Math.max(0, Math.min(1, share)) * 100 + "%";
  return make("li", {}, bar, anchor, badge ? make("span", { class: "badge" }, badge) : "",
    make("span", { class: "value" }, text));
}

const percent = (probability) => (100 * probability).toFixed(1) + " %";
const through = (relation, role) => role === "head" ? relation + " →" : "← " + relation;

function group(label, count, isOpen, ...content) {
  const element = make("details", {}, make("summary", {}, make("span", { class: "name" }, label),
    make("span", { class: "count" }, count)), ...content);
  element.open = isOpen;
  return element;
}

function knownGroup(state, entity, one, isOpen, signal) {
  const list = make("ul", { class: "rows" });
  const by = through(one.relation, one.role);
  const element = group(by, one.count.toLocaleString(), isOpen, list);
  const add = (others) => list.append(...others.map((other) => make("li", {},
    stepLink(state, other.name, other.type, by), make("span", { class: "badge" }, other.split))));
  add(one.others);
  let loaded = one.others.length;
  if (loaded < one.count) {
    const more = make("button", { type: "button" }, "Show more");
    more.addEventListener("click", async () => {
      more.disabled = true;
      try {
        const found = await ask("/triples", {
          entity: entity.name, type: entity.type, relation: one.relation, role: one.role,
          limit: 10 * ROWS, offset: loaded,
        }, null, signal);
        const others = found.groups.length ? found.groups[0].others : [];
        add(others);
        loaded += others.length;
        more.hidden = !others.length || loaded >= one.count;
      } catch (error) {
        if (error.name !== "AbortError") more.after(make("p", { class: "problem" }, error.message));
      }
      more.disabled = false;
    });
    element.append(more);
  }
  return element;
}

/** A button that opens the reasons for a link below its row. */
function reasons(triple, element, signal) {
  const shownReasons = make("div", { class: "reasons" });
  const text = (one) => `(${one.head}, ${one.relation}, ${one.tail})`;
  const list = (title, rows) => rows.length ? [make("p", { class: "note" }, title),
    make("ul", {}, ...rows.map((cells) => make("li", {}, cells)))] : [];
  const button = make("button", { type: "button", class: "why", "aria-expanded": "false" }, "why?");
  button.addEventListener("click", async () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    shownReasons.replaceChildren();
    if (isOpen) return;
    await fill(shownReasons, async () => {
      const found = await ask("/explain", {}, triple, signal);
      return [
        ...list("Rules that imply it", found.rules.map((one) =>
          `${percent(one.confidence)} ${one.rule}: ${one.path.map(text).join(", ")}`)),
        ...list("Triples that raise the score most", found.triples.map(text)),
        ...list("Known with a similar entity", found.similar.map((one) =>
          `${one.entity} instead of ${triple[one.instead_of]}`)),
      ];
    });
  });
  element.append(button, shownReasons);
  return element;
}

/** Show the answers to one query below its relation. */
function showAnswers(state, query, result, signal) {
  const target = query.target;
  if (result.problem) {
    target.replaceChildren(make("p", { class: "problem" }, result.problem));
    return;
  }
  const high = Math.max(...result.answers.map((answer) => answer.score));
  const rows = result.answers.map((answer) => {
    const name = query.role === "head" ? answer.tail : answer.head;
    const has = answer.probability !== null;
    const text = has ? percent(answer.probability) : answer.score.toFixed(3);
    // Bars begin at zero. Scores below it, as those of distances, have none.
    const share = has ? answer.probability : high > 0 ? answer.score / high : 0;
    const element = row(stepLink(state, name, result.type, through(query.relation, query.role) + " ?"), text, share,
      answer.known_from);
    const triple = { head: answer.head, relation: answer.relation, tail: answer.tail };
    return model.no_triples || query.isUnseen ? element : reasons(triple, element, signal);
  });
  target.replaceChildren(rows.length ? make("ul", { class: "rows" }, ...rows)
    : make("p", { class: "note" }, "no other answers"));
}

/** The relations that entities of a type may have, with the role of the entity. */
function queriesOf(type) {
  return relations.flatMap((one) => [["head", one.head_type], ["tail", one.tail_type]]
    .filter(([, own]) => own === type).map(([role]) => ({ relation: one.relation, role })));
}

function predictions(state, entity, counts, signal) {
  const known = model.no_triples ? "keep" : state.showKnown ? "mark" : "drop";
  const queries = queriesOf(entity.type)
    .map((query) => ({ ...query, count: counts.get(query.role + " " + query.relation) || 0 }));
  // Relations that the entity has come first: a model has learned least about the others.
  queries.sort((left, right) => right.count - left.count);
  const body = (some) => ({
    queries: some.map((query) => ({ [query.role]: entity.name, relation: query.relation })), k: PREDICTIONS, known,
    candidates: model.no_triples || state.showAll ? "all" : "seen",
  });
  const load = async (some) => {
    const waiting = some.filter((query) => !query.asked);
    if (!waiting.length) return;
    waiting.forEach((query) => { query.asked = true; });
    try {
      const { results } = await ask("/predict", {}, body(waiting), signal);
      waiting.forEach((query, place) => showAnswers(state, query, results[place], signal));
    } catch (error) {
      if (error.name === "AbortError") return;
      waiting.forEach((query) => query.target.replaceChildren(make("p", { class: "problem" }, error.message)));
    }
  };
  const list = make("div");
  const more = make("button", { type: "button" }, "Show more relations");
  const filter = make("input", { type: "search", placeholder: "Filter relations", "aria-label": "Filter relations" });
  let limit = SHOWN_AT_A_TIME;
  const render = () => {
    const text = filter.value.toLowerCase();
    const fitting = queries.filter((query) => query.relation.toLowerCase().includes(text));
    list.replaceChildren(...fitting.slice(0, limit).map((query) => {
      query.target ??= make("div", {}, make("p", { class: "note" }, "…"));
      query.element ??= group(through(query.relation, query.role),
        query.count ? query.count.toLocaleString() + " known" : "", false, query.target);
      query.element.ontoggle = () => query.element.open && load([query]);
      return query.element;
    }));
    more.hidden = fitting.length <= limit;
  };
  filter.addEventListener("input", render);
  more.addEventListener("click", () => { limit += SHOWN_AT_A_TIME; render(); });
  render();
  const first = queries.slice(0, OPENED);
  const answered = load(first);
  first.forEach((query) => { query.element.open = true; });
  const choice = (name, text) => {
    const box = make("input", { type: "checkbox" });
    box.checked = state[name];
    box.addEventListener("change", () => go(addressOf(state.steps, { ...state, [name]: box.checked })));
    return make("label", {}, box, text);
  };
  const tools = model.no_triples ? [] : [choice("showKnown", "with known answers"),
    choice("showAll", "also entities not seen with the relation")];
  const note = model.probabilities ? "Probability that the triple is true."
    : "Scores: only those below one relation can be compared.";
  return [make("p", { class: "note" }, note), make("div", { class: "tools" }, ...tools,
    queries.length > SHOWN_AT_A_TIME ? filter : ""), list, more, answered];
}

async function showEntity(state, signal) {
  const asked = state.steps[state.steps.length - 1];
  const title = make("h1", { tabindex: "-1" }, asked.name);
  const facts = make("p", { class: "facts" });
  const sections = ["Known triples", "Predicted", "Similar"].map((text) => make("section", { "aria-label": text },
    make("h2", {}, text)));
  const [known, predicted, similar] = sections;
  // On narrow screens the sections are below each other.
  const jumps = make("div", { class: "jumps" }, ...sections.map((section) => make("button", {
    type: "button", onclick: () => section.scrollIntoView(),
  }, section.getAttribute("aria-label"))));
  byId("main").replaceChildren(title, facts);
  const parameters = { entity: asked.name, type: asked.type || null };
  let alike;
  try {
    // Also finds out the type, and whether there is such an entity.
    alike = await ask("/similar", { ...parameters, k: ROWS }, null, signal);
  } catch (error) {
    if (error.name !== "AbortError") facts.after(make("p", { class: "problem" }, error.message));
    return;
  }
  const entity = { name: asked.name, type: alike.type };
  facts.textContent = alike.type;
  byId("main").append(jumps, make("div", { class: "columns" }, ...sections));
  const how = model.similarity[alike.type];
  const note = how.method === "exact" ? "Cosine of the rows, among entities of type " + alike.type + "."
    : "Cosine of the rows; approximate search, recall@10 " + how.recall_at_10.toFixed(3) + ".";
  similar.append(make("p", { class: "note" }, note), make("ul", { class: "rows" }, ...alike.similar.map((one) => row(
    stepLink(state, one.name, alike.type, "similar"), one.cosine.toFixed(3), one.cosine, null))));
  const counts = new Map();
  if (model.no_triples) {
    known.append(make("p", { class: "note" }, model.no_triples));
  } else {
    await fill(known, async () => {
      const found = await ask("/triples", { entity: entity.name, type: entity.type, limit: ROWS }, null, signal);
      found.groups.forEach((one) => counts.set(one.role + " " + one.relation, one.count));
      facts.textContent = alike.type + ", " + found.triples.toLocaleString() + " known triples";
      return found.groups.map((one, place) => knownGroup(state, entity, one, place < OPENED, signal));
    });
    if (signal.aborted) return;
  }
  await fill(predicted, async () => {
    const parts = predictions(state, entity, counts, signal);
    const answered = parts.pop();
    predicted.append(...parts);
    await answered;
    return [];
  });
}

const NOWHERE = { steps: [], showKnown: false, showAll: false };

/** A form with a button of its name; `work` returns what stands below it afterwards. */
function form(name, fields, work) {
  const answers = make("div");
  const onsubmit = async (event) => {
    event.preventDefault();
    answers.replaceChildren();
    await fill(answers, work);
  };
  return make("section", { "aria-label": name }, make("h2", {}, name), make("form", { class: "tools", onsubmit },
    ...fields, make("button", { type: "submit" }, name)), answers);
}

/** A field for questions of several hops; each answer has the links that led to it. */
function hops() {
  const question = make("input", {
    type: "search", required: "", "aria-label": "Question", placeholder: "?x : (Alice, knows, ?y), (?y, likes, ?x)",
  });
  return form("Ask", [question], async () => {
    const found = await ask("/ask", {}, { question: question.value, k: ROWS }, shown.signal);
    const sign = (link) => (link.not ? "not " : "") + `(${link.head}, ${link.relation}, ${link.tail})`
      + (link.known ? "" : " " + percent(link.probability));
    const rows = found.answers.map((answer) => [
      row(stepLink(NOWHERE, answer.entity, found.type, "asked"), percent(answer.probability), answer.probability, null),
      make("li", { class: "note" }, answer.path.map(sign).join(", ")),
    ]);
    return [rows.length ? make("ul", { class: "rows" }, ...rows.flat()) : make("p", { class: "note" }, "no answers")];
  });
}

const area = (label, placeholder) => make("textarea", { "aria-label": label, placeholder, rows: "3" });
const cells = (field) => field.value.split("\n").filter((one) => one.trim()).map((one) => one.split("\t"));

/** Fields for an entity that the run does not know: what is near it, and its likely triples. */
function unseen() {
  const name = make("input", { required: "", "aria-label": "Name", placeholder: "Name" });
  const text = area("Text", "A text about it, where the run has features of texts");
  const triples = area("Triples", "or its triples: head, relation and tail on a line, with tabs between them");
  return form("New entity", [name, text, triples], async () => {
    const facts = cells(triples).map(([head, relation, tail]) => ({ head, relation, tail }));
    const body = { name: name.value, text: text.value || null, triples: facts.length ? facts : null };
    const near = await ask("/unseen", {}, { ...body, k: ROWS }, shown.signal);
    const queries = queriesOf(near.type).slice(0, SHOWN_AT_A_TIME)
      .map((query) => ({ ...query, isUnseen: true, target: make("div") }));
    const asked = queries.map((query) => ({ [query.role]: near.entity, relation: query.relation }));
    const { results } = await ask("/unseen", {}, { ...body, queries: asked, k: PREDICTIONS }, shown.signal);
    queries.forEach((query, place) => showAnswers(NOWHERE, query, results[place], shown.signal));
    return [
      make("h3", {}, "Similar"), make("ul", { class: "rows" }, ...near.similar.map((one) => row(
        stepLink(NOWHERE, one.name, near.type, "similar"), one.cosine.toFixed(3), one.cosine, null))),
      make("h3", {}, "Predicted"), ...queries.map((query, place) => group(through(query.relation, query.role), "",
        place < OPENED, query.target)),
    ];
  });
}

/** A field for numbers of some entities; those of others are predicted. */
function numbers() {
  const values = area("Values", "an entity and its number on a line, with a tab between them; at least 10");
  return form("Numbers", [values], async () => {
    const given = Object.fromEntries(cells(values).map(([name, value]) => [name, Number(value)]));
    const found = await ask("/attributes", {}, { values: given, k: ROWS }, shown.signal);
    const note = `R² ${found.r2.toFixed(3)}, mean error ${found.mean_error.toPrecision(3)}, of given values from others`;
    return [make("p", { class: "note" }, note), make("ul", { class: "rows" }, ...found.entities.map((one) => row(
      stepLink(NOWHERE, one.entity, "", "number"), one.predicted.toPrecision(4), 0, null)))];
  });
}

async function showHome(signal) {
  const types = Object.entries(model.entities);
  const rows = relations.slice().sort((left, right) => (right.triples || 0) - (left.triples || 0));
  const body = make("tbody");
  const more = make("button", { type: "button" }, "Show more");
  const add = () => {
    const start = body.children.length;
    body.append(...rows.slice(start, start + SHOWN_AT_A_TIME).map((one) => make("tr", {},
      make("td", {}, one.relation), types.length > 1 ? make("td", {}, one.head_type + " → " + one.tail_type) : "",
      make("td", { class: "count" }, one.triples === null ? "" : one.triples.toLocaleString()))));
    more.hidden = body.children.length >= rows.length;
  };
  more.addEventListener("click", add);
  add();
  const first = make("section", { "aria-label": "Entities" }, make("h2", {}, "Entities"));
  const about = [
    [model.score_function, "dimension " + model.dimension].join(", "),
    ...types.map(([type, count]) => count.toLocaleString() + " × " + type),
    model.relations.toLocaleString() + " relations",
  ].join(" · ");
  byId("main").replaceChildren(
    make("h1", { tabindex: "-1" }, model.dataset),
    make("p", { class: "facts" }, about),
    model.no_triples ? make("p", { class: "problem" }, model.no_triples) : "",
    model.probabilities && !model.no_triples ? hops() : "",
    unseen(),
    numbers(),
    make("div", { class: "columns" }, first, make("section", { "aria-label": "Relations" }, make("h2", {}, "Relations"),
      make("table", {}, make("thead", {}, make("tr", {}, make("th", {}, "relation"),
        types.length > 1 ? make("th", {}, "types") : "", make("th", { class: "count" }, "triples"))), body), more)),
  );
  await fill(first, async () => {
    const { entities } = await ask("/entities", { k: ROWS }, null, signal);
    return [make("ul", { class: "rows" }, ...entities.map((one) => make("li", {}, stepLink(NOWHERE, one.name, one.type, ""),
      types.length > 1 ? make("span", { class: "badge" }, one.type) : "")))];
  });
}

async function show(isStep) {
  shown.abort();
  shown = new AbortController();
  const signal = shown.signal;
  const state = readState();
  const entity = state.steps[state.steps.length - 1];
  document.title = (entity ? entity.name + " – " : "") + model.dataset + " – dglkge";
  showTrail(state);
  const work = entity ? showEntity(state, signal) : showHome(signal);
  if (isStep) {
    window.scrollTo(0, 0);
    byId("main").querySelector("h1").focus();
  }
  await work;
  if (!signal.aborted) document.body.dataset.ready = entity ? entity.name : "";
}

async function start() {
  takeTokenFromAddress();
  prepareSearch();
  byId("home").addEventListener("click", (event) => follow(event, "/"));
  try {
    const health = await ask("/health");
    // Asked before the first question: its refusal would stand in the browser's console as an error.
    if (health.needs_token && !sessionStorage.getItem(TOKEN_KEY)) await askToken("");
    model = await ask("/model");
    relations = (await ask("/relations")).relations;
  } catch (error) {
    byId("main").replaceChildren(make("p", { class: "problem" }, error.message));
    return;
  }
  window.addEventListener("popstate", () => show(false));
  await show(false);
}

start();
