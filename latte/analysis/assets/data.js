"use strict";
// The report's numbers: unpacked when they are first needed, and the attention that follows from them.

const STEPS = 65535;

/** When all of the page has arrived: blocks of numbers come last, so that the text is there before them. */
const arrived = new Promise((resolve) => {
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", resolve);
  else resolve();
});

/** The 16-bit numbers of a block: base64 of a compressed list of all low bytes, then of all high bytes. */
async function unpack(id) {
  await arrived;
  const node = document.getElementById(id);
  const text = atob(node.textContent.trim());
  const packed = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) packed[i] = text.charCodeAt(i);
  node.remove();
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const count = planes.length / 2;
  const numbers = new Uint16Array(count);
  for (let i = 0; i < count; i++) numbers[i] = planes[i] | (planes[count + i] << 8);
  return numbers;
}

/** One layer's attention over the T tokens that are shown. States are counted from 0; the window, if any, is state 0. */
class Layer {
  constructor(about, tokens) {
    Object.assign(this, about); // name, heads, latents, window, causal, nearest, keyLow, keyStep, blocks
    this.tokens = tokens;
    this.states = this.latents ? this.latents + (this.window ? 1 : 0) : 0;
    this.data = {};
    this.waiting = {};
    this.norms = new Map();
  }

  /** Unpack one part: "states", "keys", "distances" or "weights". */
  load(part) {
    if (!(part in this.blocks)) return Promise.resolve();
    this.waiting[part] ??= unpack(this.blocks[part]).then((numbers) => { this.data[part] = numbers; });
    return this.waiting[part];
  }

  loadAll() {
    return Promise.all(["states", "keys", "distances", "weights"].map((part) => this.load(part)));
  }

  has(part) {
    return part in this.data;
  }

  /** Whether a state is the window. */
  isWindow(state) {
    return Boolean(this.window) && state === 0;
  }

  label(state) {
    return this.isWindow(state) ? "window" : String(this.window ? state : state + 1);
  }

  /** p(l|t) of one state. */
  state(head, token, state) {
    return this.data.states[(head * this.tokens + token) * this.states + state] / STEPS;
  }

  /** p(·|t) of all states. */
  choice(head, token) {
    return Array.from({ length: this.states }, (_, state) => this.state(head, token, state));
  }

  /** The key logit of token s for a latent, counted from 0. */
  key(head, s, latent) {
    const place = head * this.latents + latent;
    return this.keyLow[place] + this.keyStep[place] * this.data.keys[(head * this.tokens + s) * this.latents + latent];
  }

  /** log Σ exp(key logits) of all tokens up to each, [T L]. */
  logNorms(head) {
    if (this.norms.has(head)) return this.norms.get(head);
    const norms = new Float64Array(this.tokens * this.latents);
    for (let latent = 0; latent < this.latents; latent++) {
      let norm = -Infinity;
      for (let s = 0; s < this.tokens; s++) {
        const logit = this.key(head, s, latent);
        const top = Math.max(norm, logit);
        norm = top + Math.log(Math.exp(norm - top) + Math.exp(logit - top));
        norms[s * this.latents + latent] = norm;
      }
    }
    this.norms.set(head, norms);
    return norms;
  }

  /** How many tokens a token may see, from the first on. */
  seen(token) {
    return this.causal ? token + 1 : this.tokens;
  }

  logNorm(head, token, latent) {
    return this.logNorms(head)[(this.seen(token) - 1) * this.latents + latent];
  }

  /** p(s|l,t) of all s that t may see, for a latent counted from 0. */
  gathered(head, latent, token) {
    const norm = this.logNorm(head, token, latent);
    const weights = new Float64Array(this.seen(token));
    for (let s = 0; s < weights.length; s++) weights[s] = Math.exp(this.key(head, s, latent) - norm);
    return weights;
  }

  /** The largest weights of the window, or of softmax attention: [position, its part of p(s|t)]. */
  near(head, token) {
    const found = [];
    if (!this.has("weights")) return found;
    const share = this.states ? this.state(head, token, 0) : 1;
    const first = (head * this.tokens + token) * this.nearest;
    for (let i = first; i < first + this.nearest; i++) {
      const weight = this.data.weights[i] / STEPS;
      if (weight > 0) found.push([(token - this.data.distances[i]) & STEPS, share * weight]); // back, or ahead
    }
    return found;
  }

  /** p(s|t) of all s; `rest` is what lies elsewhere in the window and was not kept. */
  row(head, token) {
    const weights = new Float64Array(this.seen(token));
    const offset = this.window ? 1 : 0;
    for (let latent = 0; latent < this.latents; latent++) {
      const p = this.state(head, token, latent + offset);
      if (p === 0) continue;
      const norm = this.logNorm(head, token, latent);
      for (let s = 0; s < weights.length; s++) weights[s] += p * Math.exp(this.key(head, s, latent) - norm);
    }
    let rest = this.hasNear ? (this.states ? this.state(head, token, 0) : 1) : 0;
    for (const [s, weight] of this.near(head, token)) {
      weights[s] += weight;
      rest -= weight;
    }
    return { weights, rest: Math.max(0, rest) };
  }

  get hasNear() {
    return "weights" in this.blocks;
  }

  /** The parts of p(s|t) that go through each state; of softmax attention, the one part. */
  parts(head, token, s) {
    const local = this.near(head, token).find(([place]) => place === s)?.[1] ?? 0;
    if (!this.states) return [local];
    const offset = this.window ? 1 : 0;
    const parts = Array.from({ length: this.latents }, (_, latent) =>
      this.state(head, token, latent + offset) * Math.exp(this.key(head, s, latent) - this.logNorm(head, token, latent)));
    return offset ? [local, ...parts] : parts;
  }
}

/** The places of the largest numbers, largest first. */
function largest(numbers, count) {
  const top = [];
  for (let i = 0; i < numbers.length; i++) {
    if (top.length === count && numbers[i] <= numbers[top[count - 1]]) continue;
    let place = top.length;
    while (place > 0 && numbers[top[place - 1]] < numbers[i]) place--;
    top.splice(place, 0, i);
    if (top.length > count) top.pop();
  }
  return top;
}
