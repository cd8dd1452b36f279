// What the scripts of the client tour share: the server's address, and a line for each thing tried (see tour.py).
export const BASE = process.env.TOUR_URL, V1 = `${BASE}/v1`, KEY = process.env.TOUR_KEY, MODEL = process.env.TOUR_MODEL;
export const FOX = "Tell me about a fox.";

export async function check(what, run) {
  try {
    const result = await run();
    console.log(result ? `ok\t${what}` : `FAIL\t${what}\tthe answer is ${JSON.stringify(result)}`);
  } catch (error) {
    console.log(`FAIL\t${what}\t${error.name}: ${`${error.message} ${error.responseBody ?? ""}`.replace(/\s+/g, " ").slice(0, 300)}`);
  }
}
