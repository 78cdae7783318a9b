// Who answers in a built folder: a worker with Python in it, so that the page never waits.
"use strict";

const KEPT = 48; // answers, the newest; some 230 kB each
let build = "", worker = null, isReady = false, number = 0, ready = null, newest = 0;
const started = new Promise((done) => { ready = done; }); // Python, or the attempt to start it
const waiting = new Map();

const result = (request) => new Promise((done, failed) => {
  request.onsuccess = () => done(request.result);
  request.onerror = () => failed(request.error);
});
// Answers to questions about no dropped file, by build and question: the same planner answers the same question alike, so that
// who comes again need not wait until Python has started.
const answers = (async () => {
  const opening = indexedDB.open("ultrascale", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("answers").createIndex("at", "at");
  const base = await result(opening);
  return (mode) => base.transaction("answers", mode).objectStore("answers");
})();
answers.catch(() => {}); // a browser that keeps nothing: open fails, throws or never answers
const keyOf = (question) => `${build} ${JSON.stringify(question)}`;

async function keepAnswer(key, text) {
  const store = (await answers)("readwrite");
  newest = Math.max(Date.now(), newest + 0.001); // several may come in one millisecond
  store.put({ text, at: newest }, key);
  let over = await result(store.count()) - KEPT;
  store.index("at").openKeyCursor().onsuccess = ({ target: { result: oldest } }) => {
    if (!oldest || over-- <= 0) return;
    store.delete(oldest.primaryKey);
    oldest.continue();
  };
}

function heard({ data }) {
  if (data.starts) return source.starts(data.starts);
  isReady = true;
  ready(null);
  if (data.isReady) return;
  const { done, key } = waiting.get(data.number), answer = JSON.parse(data.answer);
  waiting.delete(data.number);
  done(answer);
  if (key && !answer.error) keepAnswer(key, data.answer).catch(() => {});
}

const source = {
  starts: () => {}, // told what is done until the planner is there
  async controls() {
    const known = await fetch("controls.json", { cache: "no-cache" }).then((reply) => reply.json());
    build = known.build;
    worker = new Worker(`worker.mjs?${build}`, { type: "module" });
    worker.onmessage = heard;
    return known;
  },
  // An answer of before, if the browser gives it before the planner could.
  async kept(question) {
    if (isReady || question.file) return null;
    const found = await Promise.race([
      answers.then((store) => result(store("readonly").get(keyOf(question)))).catch(() => null),
      started,
    ]);
    return found ? JSON.parse(found.text) : null;
  },
  ask: (question) => new Promise((done) => {
    waiting.set(++number, { done, key: question.file ? null : keyOf(question) });
    worker.postMessage({ number, question: JSON.stringify(question) });
  }),
};
