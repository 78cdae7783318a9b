// Draws an answer. Every number comes with its text: nothing is computed here but where a mark stands.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function make(tag, attributes = {}, ...children) {
  const own = ["svg", "g", "rect", "circle", "line", "path", "text", "title"].includes(tag);
  const node = own && attributes.svg !== false ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "svg" || value === undefined || value === false || value === null) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

function section(id, title, about, ...children) {
  return make("section", { "aria-labelledby": `${id}-title`, id },
    make("h2", { id: `${id}-title` }, title), about ? make("p", { class: "about" }, about) : null, ...children.filter(Boolean));
}

function table(columns, rows, { caption, pressed } = {}) {
  const cell = (value, index) => make(index ? "td" : "th", index ? {} : { scope: "row" }, value instanceof Node ? value : String(value));
  return make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, caption ? make("caption", {}, caption) : null,
      make("thead", {}, make("tr", {}, columns.map((name) => make("th", { scope: "col" }, name)))),
      make("tbody", {}, rows.map((row, index) => make("tr", { class: pressed && pressed(index) }, row.map(cell))))));
}

function asTable(title, columns, rows) {
  return make("details", { class: "numbers" }, make("summary", {}, "The numbers"), table(columns, rows, { caption: title }));
}

function place(node, left, width) {  // in percent; set here, since the page allows no inline style
  node.style.left = `${left}%`;
  node.style.width = `${Math.max(width, 0)}%`;
  return node;
}

// A bar of parts one after another; `limits` are lines across it.
function stackedBar(parts, most, limits = []) {
  let done = 0;
  const share = (value) => (100 * value) / most, track = make("div", { class: "track" });
  for (const part of parts) {
    track.append(place(make("span", { class: `part ${part.name}`, title: `${part.label}: ${part.text}` }), share(done), share(part.value)));
    done += part.value;
  }
  for (const [kind, words, limit] of limits) track.append(place(make("span", { class: `limit ${kind}`, title: `${words}: ${limit.text}` }), share(limit.value), 0));
  return track;
}

// Memory at the peak by category, a bar for each ZeRO stage and one for each rank of the pipeline, against the device.
function drawMemory(memory, choose) {
  const most = Math.max(memory.capacity.value, ...memory.bars.map((bar) => bar.value));
  const limits = [["", "a device", memory.capacity], ["usable", "to be used", memory.usable]];
  const used = new Set([...memory.bars, ...memory.ranks].flatMap((bar) => bar.parts.map((part) => part.name)));
  const rows = memory.bars.map((bar) => {
    const words = `${bar.text}, ${bar.fits ? `fits, step ${bar.step}` : `does not fit; step, if it did, ${bar.step}`}`;
    const label = choose
      ? make("button", { type: "button", "aria-pressed": String(bar.chosen), title: `Plan with ${bar.label}`, onclick: () => choose(bar.zero_stage) }, bar.label)
      : make("b", {}, bar.label);
    return make("div", { class: `bar ${bar.fits ? "" : "unfit"}` }, label, stackedBar(bar.parts, most, limits), make("span", { class: "value" }, words));
  });
  const names = memory.legend.filter((one) => used.has(one.name));
  const legend = make("ul", { class: "legend" },
    names.map((one) => make("li", { title: one.note }, make("i", { class: `part ${one.name}` }), one.label)),
    make("li", {}, make("i", { class: "mark" }), `a device, ${memory.capacity.text}`),
    make("li", {}, make("i", { class: "mark usable" }), `to be used, ${memory.usable.text}`));
  const numbers = asTable("Memory by category", ["", ...names.map((one) => one.label), "total"], [...memory.bars, ...memory.ranks].map((bar) =>
    [bar.label, ...names.map((one) => (bar.parts.find((part) => part.name === one.name) || { text: "0" }).text), bar.text]));
  const ranks = memory.ranks.map((rank) => make("div", { class: "bar" }, make("b", {}, rank.label), stackedBar(rank.parts, most, limits), make("span", { class: "value" }, rank.text)));
  return section("memory", "Memory at the peak", "The rank that needs most, by category, with each ZeRO stage.", rows,
    ...(ranks.length ? [make("h3", {}, "Pipeline ranks"), make("p", { class: "about" }, "Live tensors at each rank's own peak, without what the allocator reserves beside them."), ...ranks] : []), legend, numbers);
}

function plainBars(rows, kind) {
  const most = Math.max(...rows.map((row) => row.value), 1e-12);
  return make("div", {}, rows.map((row) => make("div", { class: "bar" }, make("b", {}, row.label),
    make("div", { class: "track" }, place(make("span", { class: `part ${row.kind || kind}`, title: row.text }), 0, (100 * row.value) / most)),
    make("span", { class: "value" }, row.note ? `${row.text}, ${row.note}` : row.text))));
}

// Where the step's time goes: each bar begins where the one before ends.
function drawWaterfall(parts) {
  if (!parts.length) return null;
  const whole = parts.reduce((sum, part) => sum + part.value, 0);
  let done = 0;
  const rows = parts.map((part) => {
    const bar = place(make("span", { class: `part time-${part.name}`, title: `${part.label}: ${part.text}, ${part.share}` }), (100 * done) / whole, (100 * part.value) / whole);
    done += part.value;
    return make("div", { class: "bar" }, make("b", {}, part.label), make("div", { class: "track" }, bar),
      make("span", { class: "value" }, `${part.text}, ${part.share}`));
  });
  const sent = parts.filter((part) => part.axis).map((part) => `${part.axis} ${part.text}`).join(", ");
  return section("time", "Time of a step", "In the order of the planner's account; each part begins where the one before ends.", rows,
    make("p", { class: "about" }, sent ? `Exposed communication, which no computing hides: ${sent}.` : "No communication is exposed."));
}

// Operations under the device's two bounds; a circle's area is its share of the computing, its number is that of the table.
function drawRoofline(roofline, width) {
  if (!roofline) return null;
  const shown = roofline.rows.map((row, index) => ({ ...row, number: index + 1 })).filter((row) => row.rate > 0);
  const height = 320, left = 92, bottom = 42, top = 14, ridge = roofline.peak.value / roofline.bandwidth.value, told = make("output", { class: "told" }, "Point at an operation.");
  const fromX = Math.log(Math.min(ridge, ...shown.map((row) => row.intensity)) / 3), toX = Math.log(Math.max(ridge, ...shown.map((row) => row.intensity)) * 2);
  const fromY = Math.log(Math.min(roofline.bandwidth.value * Math.exp(fromX), ...shown.map((row) => row.rate)) / 1.5), toY = Math.log(roofline.peak.value * 1.25);
  const x = (value) => left + ((Math.log(value) - fromX) / (toX - fromX)) * (width - left - 16);
  const y = (value) => top + (1 - (Math.log(value) - fromY) / (toY - fromY)) * (height - bottom - top);
  const spots = new Map();  // operations of one shape lie on one another
  for (const row of shown) {
    const key = `${x(row.intensity).toFixed(0)} ${y(row.rate).toFixed(0)}`;
    spots.set(key, [...(spots.get(key) || []), row]);
  }
  const dots = [...spots.values()].map((rows) => {
    const words = rows.map((row) => `${row.number} ${row.name}: ${row.rate_text}, ${row.reached} of the bound, ${row.share} of computing`).join("; ");
    const radius = 4 + 22 * Math.sqrt(rows.reduce((sum, row) => sum + parseFloat(row.share) / 100, 0)), [cx, cy] = [x(rows[0].intensity), y(rows[0].rate)];
    return make("g", { class: "operation", "data-told": words }, make("circle", { class: `dot ${rows[0].kind === "attention" ? "attention" : "product"}`, cx, cy, r: radius, "data-told": words }),
      radius > (rows.length > 1 ? 9 : 7) ? make("text", { class: "number", x: cx, y: cy + 4 }, rows.length > 1 ? `${rows[0].number}+` : String(rows[0].number)) : null);
  });
  const mark = (value, text) => [make("line", { class: "axis", x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4 }), make("text", { class: "middle", x: x(value), y: height - bottom + 17 }, text)];
  const steps = [-1, 0, 1, 2, 3, 4, 5].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));
  const tens = steps.filter((value) => Math.log(value) > fromX && Math.log(value) < toX && (width > 500 || String(value)[0] === "1"));
  const rates = steps.filter((value) => Math.log(value * 1e12) > fromY && Math.log(value * 1e12) < toY);
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Roofline of a ${roofline.device}: ${roofline.peak.text}, ${roofline.bandwidth.text}, ridge at ${roofline.ridge}` },
    make("line", { class: "axis", x1: left, x2: width - 12, y1: height - bottom, y2: height - bottom }), make("line", { class: "axis", x1: left, x2: left, y1: 8, y2: height - bottom }),
    tens.flatMap((value) => mark(value, value.toLocaleString("en"))), rates.map((value) => make("text", { class: "end", x: left - 6, y: y(value * 1e12) + 4 }, `${value.toLocaleString("en")} TFLOP/s`)),
    make("path", { class: "roof", d: `M${x(Math.exp(fromX))} ${y(roofline.bandwidth.value * Math.exp(fromX))}L${x(ridge)} ${y(roofline.peak.value)}H${width - 12}` }), dots,
    make("text", { class: "end", x: width - 14, y: y(roofline.peak.value) - 5 }, `${roofline.peak.text} dense`),
    make("text", { x: x(Math.exp((fromX + Math.log(ridge)) / 2)) + 10, y: y(roofline.bandwidth.value * Math.exp((fromX + Math.log(ridge)) / 2)) + 16 }, `${roofline.bandwidth.text} of memory`),
    make("text", { class: "end", x: width - 14, y: height - 6 }, width > 500 ? "FLOPs per byte of memory traffic (both axes logarithmic)" : "FLOPs per byte (logarithmic)"));
  const tell = (event) => { const of = event.target.closest("[data-told]"); if (of) told.textContent = of.dataset.told; };
  picture.addEventListener("pointerover", tell);
  picture.addEventListener("pointerdown", tell);
  return section("roofline", "Roofline of the step's operations", "Forward and backward of the slowest rank, at the speed the planner prices them. Element-wise work has no products: its bound is memory.",
    make("p", { class: "about" }, `Compute of the step, ${roofline.account.text}: ${roofline.account.parts.map((part) => `${part.label} ${part.text}`).join(", ")}.`), picture, told,
    make("ul", { class: "legend" }, make("li", {}, make("i", { class: "dot product" }), "matrix products"), make("li", {}, make("i", { class: "dot attention" }), "attention")),
    table(["", "operation", "time", "share", "reaches", "of its bound", "bound by", "intensity", "times a step"], roofline.rows.map((row, index) =>
      [index + 1, row.name, row.text, row.share, row.rate_text, row.reached, row.bound, row.intensity_text, row.times]), { caption: "Operations of the step" }));
}

const AXIS_PART = { tp: "tensor_parallel", cp: "context_parallel", ep: "expert_parallel", expert_tp: "expert_parallel", pp: "pipeline_sends" };

// What a rank sends in a step, by axis.
function drawSent(sent) {
  if (!sent) return null;
  const rows = sent.rows.map((row) => ({ label: `${row.axis}, ${row.kind}`, value: row.value, kind: `time-${AXIS_PART[row.axis] || "data_parallel"}`, text: row.text,
    note: `${row.count} ${row.count === "1" ? "message" : "messages"} ${row.kind === "send" ? "to single ranks" : `of ${row.group} ranks`}, ${row.over === "node" ? "in the node" : "network"}` }));
  return section("sent", "Sent in a step, by axis", sent.note, rows.length ? plainBars(rows) : null);
}

const KINDS = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

// The schedule's own list of actions, a row a rank; what is under the pointer is told below.
function drawSchedule(schedule, width) {
  if (!schedule) return section("schedule", "Pipeline schedule", "No pipeline to draw: every rank runs its micro-batches one after another.");
  const left = 34, row = 24, gap = 4, height = schedule.ranks.length * (row + gap) + 24;
  const scale = (width - left - 4) / schedule.value;
  const told = make("output", { class: "told" }, "Point at a pass, or touch it.");
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": schedule.title });
  schedule.ranks.forEach((rank, index) => {
    const y = index * (row + gap);
    picture.append(make("text", { x: 0, y: y + 16 }, String(rank.rank)), make("rect", { class: "idle", x: left, y, width: width - left - 4, height: row }));
    for (const [name, start, end] of rank.actions) {
      const passes = [...name.matchAll(/(\d+)([FBIW])(\d+)/g)];
      passes.forEach(([, stage, kind, batch], half) => {
        const tall = row / passes.length, wide = Math.max((end - start) * scale, 0.6);
        const words = `rank ${rank.rank}: ${KINDS[kind]} of micro-batch ${batch}, stage ${stage}, ${(1e3 * start).toPrecision(4)} to ${(1e3 * end).toPrecision(4)} ms`;
        const box = make("rect", { class: `pass ${kind} ${batch % 2 ? "odd" : ""}`, x: left + start * scale, y: y + half * tall, width: wide, height: tall, "data-told": words });
        picture.append(box);
        if (wide > 7 * batch.length + 4 && tall > 12) picture.append(make("text", { class: "number", x: left + start * scale + wide / 2, y: y + half * tall + tall / 2 + 4 }, batch));
      });
    }
  });
  picture.append(make("text", { x: left, y: height - 4 }, "0"), make("text", { x: width - 4, y: height - 4, class: "end" }, schedule.text));
  const tell = (event) => { if (event.target.dataset.told) told.textContent = event.target.dataset.told; };
  picture.addEventListener("pointerover", tell);
  picture.addEventListener("pointerdown", tell);
  const kinds = new Set(schedule.ranks.flatMap((rank) => rank.actions.flatMap(([name]) => name.match(/[FBIW](?=\d)/g) || [])));
  return section("schedule", "Pipeline schedule", `${schedule.title}.`, picture, told,
    make("ul", { class: "legend" }, [...kinds].map((kind) => make("li", {}, make("i", { class: `pass ${kind}` }), KINDS[kind])), make("li", {}, make("i", { class: "idle" }), "waiting")),
    asTable("Ranks", ["rank", "waits", "micro-batches kept"], schedule.ranks.map((rank) => [rank.rank, rank.idle, rank.kept])));
}

// Time against memory: what no layout beats in both, and where the ranking lies.
function drawFront(ranking, width, choose) {
  if (ranking.front.length < 2) return null;
  const height = 300, left = 70, bottom = 40, points = [...ranking.front, ...ranking.rows];
  const span = (name) => { const all = points.map((one) => one[name].value); return [Math.min(...all), Math.max(...all)]; };
  const [fast, slow] = span("step").map(Math.log), [small, large] = span("memory");
  const x = (one) => left + ((Math.log(one.step.value) - fast) / (slow - fast || 1)) * (width - left - 20);
  const y = (one) => 12 + (1 - (one.memory.value - small) / (large - small || 1)) * (height - bottom - 24);
  const order = [...ranking.front].sort((a, b) => a.step.value - b.step.value);
  const stairs = order.map((one, index) => (index ? `H${x(one)}V${y(one)}` : `M${x(one)} ${y(one)}`)).join("");
  const told = make("output", { class: "told" }, "Point at a layout, or move to it with the tab key.");
  const dot = (one, kind) => {
    const words = `${one.layout}: ${one.step.text}, ${one.memory.text}`;
    const mark = make(kind === "front" ? "circle" : "rect", {
      class: `dot ${kind}`, tabindex: choose ? "0" : undefined, role: choose ? "button" : undefined, "aria-label": words,
      ...(kind === "front" ? { cx: x(one), cy: y(one), r: 5 } : { x: x(one) - 4, y: y(one) - 4, width: 8, height: 8 }),
      onpointerover: () => { told.textContent = words; }, onfocus: () => { told.textContent = words; },
      onclick: () => choose && choose(one.settings), onkeydown: (event) => { if (choose && event.key === "Enter") choose(one.settings); },
    }, make("title", {}, words));
    return mark;
  };
  const end = (name, sign) => points.reduce((best, one) => (sign * one[name].value < sign * best[name].value ? one : best))[name].text;
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Time against memory" },
    make("line", { class: "axis", x1: left, x2: width - 12, y1: height - bottom, y2: height - bottom }), make("line", { class: "axis", x1: left, x2: left, y1: 8, y2: height - bottom }),
    make("path", { class: "stairs", d: stairs }), ranking.rows.map((one) => dot(one, "ranked")), order.map((one) => dot(one, "front")),
    make("text", { x: left, y: height - 20 }, end("step", 1)), make("text", { class: "end", x: width - 12, y: height - 20 }, end("step", -1)),
    make("text", { class: "end", x: width - 12, y: height - 4 }, "time of a step (logarithmic)"),
    make("text", { class: "end", x: left - 6, y: 18 }, end("memory", -1)), make("text", { class: "end", x: left - 6, y: height - bottom - 8 }, end("memory", 1)));
  return section("front", "Time against memory", "Circles: no layout beats them in both. Squares: the ranking.", picture, told,
    asTable("Front", ["layout", "step", "memory"], order.map((one) => [one.layout, one.step.text, one.memory.text])));
}

function drawRanking(ranking, choose) {
  const rows = ranking.rows.map((one, index) => [
    choose ? make("button", { type: "button", title: "Plan this layout", onclick: () => choose(one.settings) }, `${one.tied && index ? "=" : ""}${index + 1}`) : `${one.tied && index ? "=" : ""}${index + 1}`,
    one.layout, one.step.text, one.interval, one.mfu, one.memory.text, one.headroom.text, one.runs ? "yes" : "",
  ]);
  const columns = ["", "layout", "step", "80% interval", "MFU", "memory", "headroom", "runs"];
  return section("ranking", "Fastest layouts", ranking.note,
    rows.length ? table(columns, rows, { caption: "Fastest layouts", pressed: (index) => (ranking.rows[index].tied ? "tied" : "") }) : null);
}

function drawScaling(rows) {
  if (!rows || !rows.length) return null;
  const bars = rows.map((row) => ({ label: `${row.gpus.toLocaleString("en")}`, value: row.value, kind: row.pays ? "time-compute" : "reserve",
    text: row.value ? `${row.text} tokens/s` : row.text, note: [row.mfu && `MFU ${row.mfu}`, row.brings && `an added one brings ${row.brings}`].filter(Boolean).join(", ") }));
  return section("scaling", "Other numbers of devices", "The best layout of each, the batch unchanged. Grey: an added device brings less than half of what one brings at best.", plainBars(bars));
}

function drawFacts(answer) {
  return section("facts", answer.title.model, `${answer.title.machine}; ${answer.title.layout}`,
    make("p", { class: `verdict ${answer.verdict.kind}` }, answer.verdict.text, answer.sufficient ? ` ${answer.sufficient}` : ""),
    answer.notes.length ? make("ul", { class: "notes" }, answer.notes.map((note) => make("li", {}, note))) : null,
    make("dl", { class: "facts" }, answer.facts.map((fact) => make("div", {}, make("dt", {}, fact.name), make("dd", {}, fact.text, make("small", {}, fact.note))))));
}

function drawWhy(answer, askWhy) {
  const told = answer.why ? answer.why.flatMap((one) => [one.title ? make("h3", {}, one.title) : null, make("ul", {}, one.lines.map((line) => make("li", {}, line)))]) : [];
  const more = askWhy ? make("button", { type: "button", id: "ask-why", onclick: askWhy }, "Say more: what binds, each choice changed, other numbers of devices") : null;
  return told.length || more ? section("why", "Why this layout", "", ...told, more) : null;
}

function download(name, text) {
  const link = make("a", { href: URL.createObjectURL(new Blob([text], { type: "text/plain" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function drawFiles(answer) {
  const files = [["run.toml", { text: answer.run_toml }], ...Object.entries(answer.flags || {}), ["plan.json", { text: `${answer.json}\n` }]];
  const shown = files.map(([name, file]) => make("details", {}, make("summary", {}, name, file.lacks ? make("small", {}, " cannot run it") : null),
    file.lacks ? make("pre", {}, file.lacks) : make("div", {}, make("button", { type: "button", onclick: () => download(name.includes(".") ? name : `${name}.txt`, file.text) }, `Save ${name}`),
      make("pre", { tabindex: "0" }, file.text.length > 20000 ? `${file.text.slice(0, 20000)}\n...` : file.text))));
  return section("files", "Take it along", "The run for `ultrascale train`, the same plan for other trainers, and all numbers.",
    make("pre", { class: "command", tabindex: "0" }, answer.command), shown);
}

// Two plans: what differs first.
function drawCompared(one, other) {
  const rows = (answer) => new Map([["Model", answer.title.model], ["Machine", answer.title.machine], ["Layout", answer.title.layout], ["Verdict", answer.verdict.text],
    ...answer.facts.map((fact) => [fact.name, fact.text]), ...answer.waterfall.map((part) => [`Time: ${part.label}`, part.text]),
    ...((answer.memory || { bars: [] }).bars.find((bar) => bar.chosen) || { parts: [] }).parts.map((part) => [`Memory: ${part.label}`, part.text])]);
  const [here, there] = [rows(one), rows(other)];
  const lines = [...new Set([...here.keys(), ...there.keys()])].map((name) => [name, here.get(name) || "", there.get(name) || ""]);
  const differs = (line) => line[1] !== line[2];
  const sorted = [...lines.filter(differs), ...lines.filter((line) => !differs(line))];
  return section("compared", "Beside the kept plan", "What differs stands first.",
    table(["", "this plan", "kept plan"], sorted, { caption: "Two plans", pressed: (index) => (differs(sorted[index]) ? "tied" : "same") }));
}

// What a person has opened, and where the focus is, found again after drawing anew.
function remember(view) {
  const of = (node) => `${(node.closest("section") || { id: "" }).id} ${node.textContent}`;
  const opened = new Set([...view.querySelectorAll("details[open] > summary")].map(of));
  const inside = "button, summary, [tabindex]", focused = view.contains(document.activeElement) ? document.activeElement : null;
  const place = focused && [focused.closest("section").id, [...focused.closest("section").querySelectorAll(inside)].indexOf(focused)];
  return () => {
    for (const summary of view.querySelectorAll("details > summary")) if (opened.has(of(summary))) summary.parentElement.open = true;
    const home = place && document.getElementById(place[0]), found = home && home.querySelectorAll(inside)[place[1]];
    if (found) found.focus({ preventScroll: true });
  };
}

// Sections whose part of the answer is still to come stay as they were, dimmed.
function draw(view, answer, { kept, choose, askWhy } = {}) {
  const width = Math.max(280, Math.min(view.clientWidth || 800, 2000) - 34), restore = remember(view);
  const chooseZero = choose && ((stage) => choose({ ...(answer.own || {}), zero_stage: String(stage) }));
  const later = (id, drawn) => {
    if (answer.flags) return drawn();
    const before = view.querySelector(`#${id}`);
    if (before) before.classList.add("stale");
    return before;
  };
  view.replaceChildren(...[
    drawFacts(answer), kept ? drawCompared(answer, kept) : null, answer.ranking ? drawRanking(answer.ranking, choose) : null,
    later("memory", () => (answer.memory.bars.length ? drawMemory(answer.memory, chooseZero) : null)), drawWaterfall(answer.waterfall), drawSchedule(answer.schedule, width),
    later("sent", () => drawSent(answer.sent)), later("roofline", () => drawRoofline(answer.roofline, width)),
    answer.ranking ? drawFront(answer.ranking, width, choose) : null, drawWhy(answer, askWhy), drawScaling(answer.scaling), drawFiles(answer),
  ].filter(Boolean));
  restore();
}
