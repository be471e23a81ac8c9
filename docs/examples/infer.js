// Classify a picture over HTTP: node infer.js PICTURE [HOST:PORT]. Node.js 18 or newer, no packages.
const { readFile } = require("node:fs/promises");

async function main() {
  const [picture, address = "127.0.0.1:8000"] = process.argv.slice(2);
  if (!picture || picture.startsWith("-")) throw new Error("usage: node infer.js PICTURE [HOST:PORT]");
  const answer = await fetch(`http://${address}/v2/models/efficientnet_lite0/infer`, {
    method: "POST",
    headers: { "Content-Type": "image/jpeg" },
    body: await readFile(picture),
  });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  for (const entry of body.outputs[0].data) {
    const [score, , label] = entry.split(":");
    console.log(Number(score).toFixed(3), label);
  }
}

main().catch((error) => {
  console.error(error.message);
  process.exitCode = 1;
});
