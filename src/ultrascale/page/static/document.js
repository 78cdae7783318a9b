// Draws what other verbs found: sections of one part each, in the components of a plan.
"use strict";

function drawLegend(parts) {
  return make("ul", { class: "legend" }, parts.map(([name, colour, faint]) => make("li", {}, make("i", { class: `k${colour}${faint ? " faint" : ""}` }), name)));
}

function frame(width, height, label, fromX, toX, fromY, toY) {
  const left = 92, bottom = 34, x = (value) => left + ((value - fromX) / (toX - fromX || 1)) * (width - left - 16);
  const y = (value) => 12 + (1 - (value - fromY) / (toY - fromY || 1)) * (height - bottom - 12);
  const picture = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label },
    make("line", { class: "axis", x1: left, x2: width - 12, y1: height - bottom, y2: height - bottom }), make("line", { class: "axis", x1: left, x2: left, y1: 8, y2: height - bottom }));
  return { picture, x, y, left, base: height - bottom };
}

const DRAWN = {
  table: (part, title) => make("div", {}, table(part.columns, part.rows, { caption: title }), part.left_out ? make("p", { class: "about" }, `and ${part.left_out.toLocaleString("en")} more`) : null),
  bars(part) {
    const whole = (row) => row.parts.reduce((sum, one) => sum + one.value, 0), most = Math.max(...part.rows.map(whole), 1e-12);
    const used = new Map(part.rows.flatMap((row) => row.parts.map((one) => [one.label, one.colour])));
    return make("div", {}, part.rows.map((row) => make("div", { class: "bar" }, make("b", {}, row.label),
      stackedBar(row.parts.map((one) => ({ ...one, name: `k${one.colour}` })), most), make("span", { class: "value" }, row.text))), drawLegend([...used]),
      asTable("Parts", ["", ...used.keys()], part.rows.map((row) => [row.label, ...[...used.keys()].map((name) => (row.parts.find((one) => one.label === name) || { text: "" }).text)])));
  },
  areas(part, title, width) {
    const { picture, x, y, left, base } = frame(width, 320, title, 0, part.rows.length - 1, 0, part.top.value * 1.06);
    const below = part.rows.map(() => 0);
    part.names.forEach((name, index) => {
      const under = part.rows.map((_, at) => `${x(at).toFixed(1)} ${y(below[at]).toFixed(1)}`).reverse();
      part.rows.forEach((row, at) => { below[at] += row[index]; });
      const over = part.rows.map((_, at) => `${x(at).toFixed(1)} ${y(below[at]).toFixed(1)}`);
      picture.append(make("path", { class: `k${part.colours[index]}`, d: `M${over.join("L")}L${under.join("L")}Z` }, make("title", {}, name)));
    });
    for (const mark of part.marks) picture.append(make("line", { class: "mark", x1: x(mark.at), x2: x(mark.at), y1: 12, y2: base }), make("text", { x: x(mark.at) + 3, y: 22 }, mark.text));
    picture.append(make("text", { class: "end", x: left - 6, y: y(part.top.value) + 4 }, part.top.text), make("text", { class: "end", x: left - 6, y: base }, "0"), make("text", { class: "end", x: width - 12, y: base + 18 }, "operations, in order"));
    return make("div", {}, picture, drawLegend(part.names.map((name, index) => [name, part.colours[index]])));
  },
  lines(part, title, width) {
    const all = part.series.flatMap((one) => one.points), told = make("output", { class: "told" }, "Point at the line.");
    const find = (index, sign) => all.reduce((best, one) => (sign * one[index] < sign * best[index] ? one : best));
    const [low, high, first, last] = [find(1, 1), find(1, -1), find(0, 1), find(0, -1)];
    const { picture, x, y, left, base } = frame(width, 260, title, first[0], last[0], low[1], high[1]);
    const colour = (index) => (index > part.series.findIndex((one) => !one.faint) ? 6 : 0);
    for (const mark of part.marks.filter((one) => one.at > first[0] && one.at < last[0])) picture.append(make("line", { class: "mark", x1: x(mark.at), x2: x(mark.at), y1: 12, y2: base }), ...mark.text.match(/.{1,32}(?= |$)/g).reverse().map((line, number) => make("text", { transform: `translate(${(x(mark.at) + 4 + 13 * number).toFixed(1)} 14) rotate(90)` }, line.trim())));
    part.series.forEach((one, index) => picture.append(make("path", { class: `line l${colour(index)}${one.faint ? " faint" : ""}`, d: `M${one.points.map((point) => `${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`).join("L")}` })));
    picture.append(make("text", { class: "end", x: left - 6, y: y(high[1]) + 8 }, high[2]), make("text", { class: "end", x: left - 6, y: y(low[1]) }, low[2]),
      make("text", { x: left, y: base + 18 }, `step ${first[0].toLocaleString("en")}`), make("text", { class: "end", x: width - 12, y: base + 18 }, `step ${last[0].toLocaleString("en")}`));
    picture.addEventListener("pointermove", (event) => {
      const box = picture.getBoundingClientRect(), at = ((event.clientX - box.left) * width) / box.width;
      const near = part.series.map((one) => [one.name, one.points.reduce((best, point) => (Math.abs(x(point[0]) - at) < Math.abs(x(best[0]) - at) ? point : best))]);
      told.textContent = near.map(([name, point]) => `${name} ${point[2]} at step ${point[0].toLocaleString("en")}`).join("; ");
    });
    return make("div", {}, picture, told, part.series.length > 1 ? drawLegend(part.series.map((one, index) => [one.name, colour(index), one.faint])) : null);
  },
  points(part, title, width) {
    const values = part.points.flatMap((one) => [one.x, one.y]), [low, high] = [Math.min(...values), Math.max(...values)], told = make("output", { class: "told" }, "Point at a cell, or move to it with the tab key.");
    const side = Math.min(width, 560), { picture, x, y, left, base } = frame(side, Math.min(side, 420), title, low, high, low, high);
    const tell = (event) => { if (event.target.dataset.told) told.textContent = event.target.dataset.told; };
    picture.append(make("line", { class: "mark", x1: x(low), y1: y(low), x2: x(high), y2: y(high) }),
      ...part.points.map((one) => make("circle", { class: "dot front", cx: x(one.x), cy: y(one.y), r: 5, tabindex: "0", role: "img", "aria-label": one.text, "data-told": one.text })),
      make("text", { class: "end", x: side - 12, y: base + 18 }, `${part.across}, to ${part.points.reduce((best, one) => (one.x > best.x ? one : best)).x_text}`),
      make("text", { class: "end", x: left - 6, y: 20 }, part.points.reduce((best, one) => (one.y > best.y ? one : best)).y_text), make("text", { class: "end", x: left - 6, y: 36 }, part.up));
    for (const kind of ["pointerover", "pointerdown", "focusin"]) picture.addEventListener(kind, tell);
    return make("div", {}, picture, told);
  },
};

function drawDocument(view, found) {
  const width = Math.max(280, Math.min(view.clientWidth || 800, 2000) - 34), restore = remember(view);
  view.replaceChildren(
    section("facts", found.title, "", make("dl", { class: "facts" }, found.facts.map((fact) => make("div", {}, make("dt", {}, fact.name), make("dd", {}, fact.text, make("small", {}, fact.note)))))),
    ...found.sections.map((one, index) => section(`part-${index}`, one.title, one.about, DRAWN[one.part.kind](one.part, one.title, width))));
  restore();
}
