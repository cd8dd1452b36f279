// An answer as it comes: its steps, text and figures. Does not know the page.
import { number } from "./dom.js";

export class Run {
  constructor(name) {
    const text = { thought: "", answer: "" }; // what the model thinks, what it says
    Object.assign(this, { name, steps: [], ids: [], ...text, sameTokens: true, speedup: null, end: null });
  }

  take(event) { // raises what the server reports
    if (event.error) throw new Error(event.error.message);
    if (event.start) this.sameTokens = event.start.same_tokens;
    if (event.step) {
      this.steps.push(event.step);
      this.speedup = event.speedup ?? this.speedup;
      this.ids.push(...event.step.tokens.map((token) => token.id));
    }
    this.thought += event.delta?.reasoning_content ?? "";
    this.answer += event.delta?.content ?? "";
    this.end = event.end ?? this.end;
  }

  get rate() { // tokens per second, without the first step, which reads the prompt
    const [first, last] = [this.steps[0], this.steps.at(-1)];
    return first ? (this.ids.length - first.tokens.length) / (last.time_s - first.time_s) : NaN;
  }

  get drafted() {
    return this.steps.reduce((sum, step) => sum + step.nodes.length - 1, 0);
  }

  get accepted() {
    return this.steps.reduce((sum, step) => sum + step.accepted.length, 0);
  }

  get figures() { // one line
    const gain = this.drafted && this.speedup ? [`about ${number(this.speedup, 2)}x plain decoding`] : [];
    const pass = `${number(this.ids.length / this.steps.length, 2)} tokens a pass`;
    return [`${this.ids.length} tokens`, `${number(this.rate)} tokens/s`, pass, ...gain].join(" · ");
  }
}
