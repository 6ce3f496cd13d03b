// The page works without this. With it, what changes is shown at once, and nothing is loaded anew.
"use strict";

const byId = (id) => document.getElementById(id);
const UNITS = [["day", 86400], ["hour", 3600], ["minute", 60]];
const ENGLISH = new Intl.RelativeTimeFormat("en", { numeric: "auto" });

function ago(at) {
  const seconds = (at - Date.now()) / 1000;
  const [unit, length] = UNITS.find(([, length]) => -seconds >= length) || [];
  return unit ? ENGLISH.format(Math.round(seconds / length), unit) : "just now";
}

function tellTimes(within = document) {
  for (const time of within.querySelectorAll("time")) {
    const at = new Date(time.dateTime);
    time.title = at.toLocaleString();
    time.textContent = ago(at);
  }
}

function parse(html) {
  const page = new DOMParser().parseFromString(html, "text/html");
  tellTimes(page);
  return page;
}

// What comes in is shown in turn, so that an answer that took long is not shown over what is newer.
let turn = Promise.resolve();
const inTurn = (act) => (turn = turn.then(act).catch(() => {}));

function replace(old, fresh) {
  const focused = old.contains(document.activeElement) ? document.activeElement : null;
  const unfolded = [...old.querySelectorAll("details[open]")].map((reason) => reason.id);
  old.replaceWith(fresh);
  for (const id of unfolded) byId(id)?.setAttribute("open", "");
  if (!focused) return;
  const row = focused.closest("li");
  (byId(focused.id) || (row && byId(row.id)) || byId("main")).focus({ preventScroll: true });
}

function say(words) {
  const said = document.createElement("p");
  said.className = "refused";
  said.textContent = words;
  byId("message").replaceChildren(said);
}

class NoList extends Error {}

// Puts in the list of another answer, and what is said above it.
async function show(address, options = {}) {
  const answer = await fetch(address, { ...options, headers: { accept: "text/html" } });
  if (new URL(answer.url).pathname === "/sign-in") return location.reload();
  const page = parse(await answer.text());
  const list = page.getElementById("list");
  if (!list) {
    const [title, ...more] = [...page.querySelectorAll("h1, .detail, main li")].map((said) => said.textContent);
    if (!options.method) throw new NoList(title);
    return say([title, ...more].join(". "));
  }
  replace(byId("list"), list);
  const said = page.getElementById("message").children;
  if (said.length || options.method) byId("message").replaceChildren(...said);
}

const LOOK_AGAIN_MS = 5000;
let looking = false;
let again = 0;

// Until it has worked: nobody says a second time that something has changed.
function look() {
  if (looking) return;
  looking = true;
  inTurn(() => { looking = false; return show(location.href).then(looked, notLooked); });
}

function looked() {
  clearTimeout(again);
  if (source?.readyState === EventSource.OPEN) tellLive("on", "Live");
}

function notLooked(error) {
  clearTimeout(again);
  tellLive("off", `Not live: ${error instanceof NoList ? error.message : "trying again"}`);
  again = setTimeout(look, LOOK_AGAIN_MS * (1 + Math.random()));
}

function showRow({ id, html }) {
  const old = byId(id);
  if (!old) return;
  const fresh = document.adoptNode(parse(html).body.firstElementChild);
  const moved = old.dataset.state !== fresh.dataset.state;
  replace(old, fresh);
  if (moved && "filtered" in byId("list").dataset) look();
}

// The stream, while the page is seen: a browser has few connections for all its pages.
let source = null;
let retry = 0;

function tellLive(kind, words) {
  const live = byId("live");
  if (live.textContent === words) return;
  live.className = kind;
  live.textContent = words;
}

function disconnect() {
  clearTimeout(retry);
  clearTimeout(again);
  if (source) source.close();
  source = null;
}

function connect() {
  disconnect();
  source = new EventSource("/live");
  source.addEventListener("look", look);
  source.addEventListener("sweep", (event) => { const row = JSON.parse(event.data); inTurn(() => showRow(row)); });
  source.addEventListener("list", look);
  source.addEventListener("away", () => tellLive("off", "Not live: the database does not answer"));
  source.onerror = () => {
    tellLive("off", "Not live: trying again");
    if (source.readyState !== EventSource.CLOSED) return;
    look();
    retry = setTimeout(connect, 5000 + 5000 * Math.random());
  };
}

document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
setInterval(tellTimes, 30000);
tellTimes();
if (!document.hidden) connect();

// Forms: of the verbs, and the question before a sweep is cancelled.
const confirming = byId("confirm");

function confirmCancel(form) {
  const { value: id } = form.elements.sweep;
  confirming.querySelector("bdi").textContent = byId(`${id}-name`).textContent;
  confirming.querySelector("form").elements.sweep.value = id;
  confirming.showModal();
}

document.addEventListener("submit", (event) => {
  const form = event.target;
  const action = new URL(form.action).pathname;
  if (action === "/cancel") {
    event.preventDefault();
    confirmCancel(form);
  } else if (action === "/ask" && event.submitter.formMethod !== "dialog") {
    event.preventDefault();
    if (form.ariaBusy) return;
    const body = new URLSearchParams(new FormData(form));
    form.ariaBusy = "true";
    if (confirming.open) confirming.close();
    const ask = () => show(form.action, { method: "POST", body });
    const unheard = () => say("The service does not answer: ask again when the page is live.");
    inTurn(() => ask().catch(unheard).finally(() => { form.ariaBusy = null; }));
  }
});

if (confirming) {
  confirming.addEventListener("close", () => {
    const id = confirming.querySelector("form").elements.sweep.value;
    (byId(`${id}-cancel`) || byId(id) || byId("main")).focus();
  });
}
