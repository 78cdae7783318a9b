// Who answers: the process that serves this page. A built folder has worker.js in its place.
"use strict";

const source = {
  controls: () => fetch("controls.json").then((reply) => reply.json()),
  kept: async () => null,
  async ask(question) {
    let reply;
    try {
      reply = await fetch("answer", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question),
      });
    } catch {
      return { error: "The server has stopped. Start it again: ultrascale page" };
    }
    return reply.ok ? reply.json() : { error: await reply.text() };
  },
};
