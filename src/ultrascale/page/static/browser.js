// Who answers in a built folder: a worker with Python in it, so that the page never waits.
"use strict";

const worker = new Worker("worker.mjs", { type: "module" });
const waiting = new Map();
let number = 0;
worker.onmessage = ({ data }) => {
  const done = waiting.get(data.number);
  waiting.delete(data.number);
  if (done) done(JSON.parse(data.answer));
};

const source = {
  controls: () => fetch("controls.json").then((reply) => reply.json()),
  ask: (question) => new Promise((resolve) => {
    waiting.set(++number, resolve);
    worker.postMessage({ number, question: JSON.stringify(question) });
  }),
};
