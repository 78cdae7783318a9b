// The form, the link, and asking. The link holds every control, so that it is a plan; `vs` holds the link of a kept plan.
"use strict";

const form = document.getElementById("form");
const view = document.getElementById("view");
const status = document.getElementById("status");
const failure = document.getElementById("error");
const WAIT = 250; // milliseconds without a letter before it is asked; a slider asks at once
let controls = [], largestFile = 0, shown = null, timer = null, slid = null;
let dropped = null, keptFile = null; // the file that is planned, and that of the kept plan; both are in the history of this tab
let progress = "Planning ..."; // what is done before an answer
let asking = false, again = false; // one question at a time: what changes meanwhile is asked when it is answered
const keptAnswers = new Map();

function field(control) {
  const id = `control-${control.name}`;
  let input;
  if (control.choices.length) {
    const any = control.default ? [] : [make("option", { value: "" }, "any")];
    input = make("select", { id, name: control.name }, any, control.choices.map((choice) => make("option", { value: choice }, choice)));
  } else {
    input = make("input", { id, name: control.name, autocomplete: "off", spellcheck: "false", placeholder: "any", inputmode: control.slider ? "numeric" : undefined });
  }
  input.setAttribute("aria-describedby", `${id}-range`);
  const slider = control.slider && make("input", { type: "range", min: control.slider[0], max: control.slider[1], step: 1, "aria-label": `${control.label}, powers of two`, "data-of": control.name });
  return make("div", { class: "field" }, make("label", { for: id }, control.label, make("span", { class: "unit" }, control.unit)), input, slider,
    make("small", { id: `${id}-range` }, control.range));
}

function buildForm() {
  for (const group of new Set(controls.map((control) => control.group))) {
    const own = controls.filter((control) => control.group === group);
    const open = innerWidth > 760 || group === controls[0].group || own.some((control) => new URLSearchParams(location.search).has(control.name));
    form.append(make("details", { class: `group ${group.toLowerCase()}`, open }, make("summary", {}, group), make("div", { role: "group", "aria-label": group }, own.map(field))));
  }
  const file = make("input", { type: "file", id: "file", accept: ".json,.toml", "aria-describedby": "file-about", onchange: () => take(file.files[0]) });
  form.append(make("div", { class: "field" }, make("label", { for: "file" }, "config.json or run.toml"), file,
    make("small", { id: "file-about" }, "Or drop one anywhere on the page. It stays on this machine, and is not in the link.")));
  document.getElementById("status").before(make("div", { class: "actions" }, make("button", { type: "button", id: "keep", onclick: keep }, "Keep to compare"),
    make("button", { type: "button", id: "unkeep", hidden: true, onclick: () => go({ vs: null }) }, "Forget the kept plan"),
    make("button", { type: "button", id: "copy", onclick: copyLink }, "Copy link"), make("button", { type: "button", id: "reset", onclick: reset }, "Start over")));
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", changed);
}

const fieldOf = (name) => form.elements.namedItem(name);

function fillForm() {
  const link = new URLSearchParams(location.search);
  for (const control of controls) {
    const value = link.has(control.name) ? link.get(control.name) : control.default, input = fieldOf(control.name);
    if (input.tagName === "SELECT" && ![...input.options].some((option) => option.value === value)) input.append(make("option", { value }, value));
    input.value = value;
    const unsaid = dropped && (isRun() || control.name === "model") ? "as in the file" : "any";
    if (input.tagName === "SELECT") for (const option of input.options) option.textContent = option.value || unsaid; else input.placeholder = unsaid;
    setSlider(control);
  }
  document.getElementById("unkeep").hidden = !link.has("vs");
}

function setSlider(control) {
  const slider = form.querySelector(`[data-of="${control.name}"]`), value = Number(fieldOf(control.name).value);
  if (!slider) return;
  if (value > 0) slider.value = Math.round(Math.log2(value));
  slider.setAttribute("aria-valuetext", `${fieldOf(control.name).value} ${control.unit}`);
}

function changed(event) {
  if (event.target.type === "file") return;
  const of = event.target.dataset.of, name = of || event.target.name, control = controls.find((one) => one.name === name);
  if (of) fieldOf(of).value = String(2 ** Number(event.target.value));
  if (name === "model") give(null);
  if (control) setSlider(control);
  clearTimeout(timer);
  performance.mark("changed");
  if (of) go({}, { replace: slid === of });
  else timer = setTimeout(() => go({}), event.target.tagName === "SELECT" ? 0 : WAIT);
  slid = of || null;
}

// The form as a link, what is the default left out.
function linkOf(changes = {}) {
  const link = new URLSearchParams();
  for (const control of controls) {
    const value = fieldOf(control.name).value.trim();
    if (value !== control.default) link.set(control.name, value);
  }
  const before = new URLSearchParams(location.search);
  for (const name of ["vs"]) if (before.has(name)) link.set(name, before.get(name));
  for (const [name, value] of Object.entries(changes)) {
    const control = controls.find((one) => one.name === name);
    if (value === null || (control && value === control.default)) link.delete(name); else link.set(name, value);
  }
  return link.toString();
}

function go(changes, { replace = false, given = false } = {}) {
  const search = linkOf(changes), url = search ? `?${search}` : location.pathname;
  if (given || search !== location.search.slice(1)) history[replace ? "replaceState" : "pushState"]({ dropped, keptFile }, "", url);
  fillForm();
  plan();
}

function questionOf(search) {
  const link = new URLSearchParams(search), question = {};
  for (const control of controls) question[control.name] = link.has(control.name) ? link.get(control.name) : control.default;
  return question;
}

async function plan() {
  again = asking;
  if (asking) {
    status.textContent = progress;
    return;
  }
  asking = true;
  do {
    again = false;
    await planOnce();
  } while (again);
  asking = false;
}

// The quick part of an answer is drawn at once, then the rest.
async function planOnce() {
  const link = new URLSearchParams(location.search), started = performance.now(), question = questionOf(location.search);
  if (dropped) question.file = dropped;
  if (link.has("why")) question.why = 1;
  status.textContent = link.has("why") ? "Planning, and looking for reasons ..." : progress;
  document.body.dataset.state = "first";
  const first = { ...question, part: "first" }, before = await source.kept(first);
  const answer = before ?? await source.ask(first);
  if (again) return;
  const kept = link.has("vs") && !answer.error ? await keptPlan(link.get("vs")) : null;
  const problem = answer.error || (kept && kept.error);
  failure.hidden = !problem;
  failure.textContent = problem || "";
  view.classList.toggle("stale", Boolean(answer.error));
  status.textContent = answer.error ? "No plan: the planner says why."
    : before ? "Planned before, in this browser, by this version of the planner."
    : `Planned in ${((performance.now() - started) / 1000).toFixed(2)} s${dropped ? `, from ${dropped.name}` : ""}.`;
  if (!answer.error) {
    shown = answer;
    render(kept && !kept.error ? kept : null);
    document.title = `${answer.title.model}: ${answer.title.layout}`;
    document.body.dataset.state = "rest";
    performance.mark("drawn");
    const rest = await answered({ ...question, part: "rest" });
    if (again || rest.error) return;
    Object.assign(shown, rest);
    render();
  }
  document.body.dataset.state = "done";
}

const answered = async (question) => await source.kept(question) ?? source.ask(question);

async function keptPlan(search) {
  const question = { ...questionOf(search), ...(keptFile && { file: keptFile }) }, key = JSON.stringify(question);
  if (!keptAnswers.has(key)) keptAnswers.set(key, await answered(question));
  return keptAnswers.get(key);
}

let lastKept = null;
function render(kept = lastKept) {
  lastKept = kept;
  const why = new URLSearchParams(location.search).has("why") || !shown.ranking;
  draw(view, shown, { kept, choose: (settings) => go(settings), askWhy: why ? null : () => go({ why: "1" }) });
}

function keep() {
  const link = new URLSearchParams(linkOf());
  link.delete("vs");
  keptFile = dropped;
  go({ vs: link.toString() }, { given: true });
}

async function copyLink() {
  try {
    await navigator.clipboard.writeText(location.href);
    status.textContent = dropped ? "Copied. The dropped file is not in it." : "Copied.";
  } catch {
    status.textContent = location.href;
  }
}

function reset() {
  give(null);
  keptFile = null;
  history.pushState({ dropped, keptFile }, "", location.pathname);
  fillForm();
  plan();
}

const isRun = () => dropped !== null && dropped.name.toLowerCase().endsWith(".toml");

// Plans a file, or none again. What it says stands in no control: a run's file says all, a config.json the model.
function give(file) {
  const wasRun = isRun();
  dropped = file;
  if (!file) document.getElementById("file").value = "";
  for (const control of controls) {
    const input = fieldOf(control.name);
    if (isRun() || (file && control.name === "model")) input.value = "";
    else if (wasRun && !input.value) input.value = control.default;
  }
}

async function take(file) {
  if (!file) return;
  if (file.size > largestFile) { // its size is asked about, and no byte of it is read
    const answer = await source.ask({ file: { name: file.name, size: file.size } });
    failure.hidden = false;
    failure.textContent = answer.error;
    return;
  }
  give({ name: file.name, text: await file.text() });
  go({}, { given: true });
}

document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  take(event.dataTransfer.files[0]);
});
const restore = (state) => { ({ dropped = null, keptFile = null } = state || {}); };
addEventListener("popstate", (event) => { restore(event.state); fillForm(); plan(); });
let widthBefore = innerWidth;
addEventListener("resize", () => { if (shown && innerWidth !== widthBefore) { widthBefore = innerWidth; render(); } });

source.starts = (told) => {
  progress = told;
  if (again || document.body.dataset.state === "first") status.textContent = told;
};
restore(history.state); // loaded again
source.controls().then((known) => { controls = known.controls; largestFile = known.largest_file; buildForm(); fillForm(); plan(); });
