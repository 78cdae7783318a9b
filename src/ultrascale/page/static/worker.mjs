// Python in the browser: the package's own planner, asked by the same function as the server's.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const ready = (async () => {
  const pyodide = await loadPyodide({ indexURL: new URL("./pyodide/", self.location.href).href });
  const wheels = await (await fetch("wheels.json")).json();
  await pyodide.loadPackage(wheels.map((name) => new URL(`./pyodide/${name}`, self.location.href).href));
  return pyodide.runPython("import json\nfrom ultrascale.cli.page import question\nlambda asked: json.dumps(question(json.loads(asked)))");
})();

self.onmessage = async ({ data }) => {
  let answer;
  try {
    answer = (await ready)(data.question);
  } catch (error) {
    answer = JSON.stringify({ error: `Python could not be started here: ${error.message}` });
  }
  self.postMessage({ number: data.number, answer });
};
