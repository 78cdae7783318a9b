// Python in the browser: the package's own planner, asked by the same function as the server's.
import { loadPyodide } from "./pyodide.mjs";

const beside = (name) => new URL(name, self.location.href).href;
const ofBuild = (name) => beside(name + self.location.search); // no older file that the browser still has
const starts = (told) => self.postMessage({ starts: told });
const fetched = self.fetch.bind(self);
// The interpreter's machine code lies there gzipped: servers of plain files do not pack it for the way.
self.fetch = async (asked, options) => {
  const url = String(asked.url ?? asked);
  if (!url.endsWith(".wasm")) return fetched(asked, options);
  const reply = await fetched(`${url}.packed`, options);
  if (!reply.ok) return reply;
  const unpacked = reply.body.pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked, { headers: { "Content-Type": "application/wasm" } });
};

const ready = (async () => {
  starts("Python is starting in this browser ...");
  const site = fetched(ofBuild("site.zip")).then((reply) => reply.arrayBuffer());
  const pyodide = await loadPyodide({ indexURL: beside("./"), stdLibURL: ofBuild("stdlib.zip") });
  starts("NumPy and the planner are unpacked ...");
  pyodide.unpackArchive(await site, "zip", { extractDir: "/lib/python3.11/site-packages" });
  starts("The planner is starting ...");
  const question = pyodide.runPython("import gc, json\ngc.set_threshold(100_000)\nfrom ultrascale.cli.plan.page import question\nlambda asked: json.dumps(question(json.loads(asked)))");
  starts("Planning ...");
  return question;
})();
ready.catch(() => {}).finally(() => self.postMessage({ isReady: true })); // a question tells what failed

self.onmessage = async ({ data }) => {
  let answer;
  try {
    answer = (await ready)(data.question);
  } catch (error) {
    answer = JSON.stringify({ error: `Python could not be started here: ${error.message}` });
  }
  self.postMessage({ number: data.number, answer });
};
