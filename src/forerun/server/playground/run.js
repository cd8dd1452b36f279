// An answer as it comes: its steps, text and figures. Does not know the page.
import { number } from "./dom.js";

export class Run {
  constructor(name) {
    Object.assign(this, { name, steps: [], ids: [], text: "", thinking: null, speedup: null, end: null });
  }

  take(event) { // raises what the server reports
    if (event.error) throw new Error(event.error.message);
    if (event.start) this.thinking = event.start.thinking;
    if (event.step) {
      this.steps.push(event.step);
      this.speedup = event.speedup ?? this.speedup;
      this.ids.push(...event.step.tokens.map((token) => token.id));
      this.text += event.step.tokens.map((token) => token.text).join("");
    }
    if (event.end) {
      this.end = event.end;
      this.text += event.end.rest;
    }
  }

  get parts() { // [the thinking, the answer]
    const { start, end, inside } = this.thinking ?? {};
    const text = this.text.trimStart();
    if (!this.thinking || !(inside || text.startsWith(start))) return ["", this.text];
    const [thought, ...rest] = (text.startsWith(start) ? text.slice(start.length) : text).split(end);
    return [thought.trim(), rest.join(end).trimStart()];
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
