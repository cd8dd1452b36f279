// A page from another origin in a real browser: preflight, a fetch, a stream.
import { createServer } from "node:http";
import { chromium } from "playwright-core";
import { check, KEY, MODEL, V1 } from "./tour.mjs";

const page_server = createServer((_, answer) => answer.setHeader("Content-Type", "text/html").end("<p>page</p>"));
await new Promise((done) => page_server.listen(Number(process.env.TOUR_ORIGIN_PORT), "127.0.0.1", done));
const executablePath = process.env.TOUR_CHROMIUM ?? "/usr/bin/chromium";
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage();
await page.goto(`http://127.0.0.1:${process.env.TOUR_ORIGIN_PORT}/`);
const ask = (stream) => page.evaluate(async ([url, key, model, stream]) => {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hi" }], max_tokens: 5, stream });
  const answer = await fetch(`${url}/chat/completions`, { method: "POST", headers: { Authorization: `Bearer ${key}`, "Content-Type": "application/json" }, body });
  return [answer.status, answer.headers.get("x-request-id"), await answer.text()];
}, [V1, KEY, MODEL, stream]);
await check("fetch from another origin", async () => { const [status, id, text] = await ask(false); return status === 200 && id && text.includes("choices"); });
await check("stream to another origin", async () => (await ask(true))[2].includes("[DONE]"));
await browser.close();
page_server.close();
