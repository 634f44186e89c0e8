"use strict";
// What stands beside the text: choices, attention, latents and the table of all heads.

const TOP = 12; // tokens in a list

/** An element with a class, text and children; text is never read as HTML. */
function make(tag, { kind = "", text = "", ...more } = {}, ...children) {
  const node = document.createElement(tag);
  if (kind) node.className = kind;
  if (text) node.textContent = text;
  Object.assign(node, more);
  node.append(...children);
  return node;
}

/** A state's colour; the window has none of its own. */
function stateColour(layer, state, opacity = 1) {
  if (layer.isWindow(state) || !layer.states) return `hsl(30 6% 50% / ${opacity})`;
  const number = layer.window ? state - 1 : state;
  return `hsl(${(number * 137.508 + 20) % 360} 62% var(--lightness) / ${opacity})`;
}

function percent(share) {
  return `${(100 * share).toFixed(2)}%`;
}

/** A probability as people read it. */
function number(p) {
  return p >= 0.0005 ? p.toFixed(3) : p === 0 ? "0" : p.toExponential(0);
}

function quoted(text) {
  const shown = text.replace(/\n/g, "↵").replace(/\t/g, "→");
  return make("code", { text: shown === "" ? "·" : shown });
}

/** A bar of parts: [share, colour]. */
function bar(parts, tick) {
  const node = make("span", { kind: "bar" });
  for (const [share, colour] of parts) {
    const part = make("i");
    part.style.width = percent(share);
    part.style.background = colour;
    node.append(part);
  }
  if (tick !== undefined) {
    const mark = make("span", { kind: "tick", title: "average over the text" });
    mark.style.left = `calc(${percent(tick)} - 1px)`;
    node.append(mark);
  }
  return node;
}

/** Every layer and head of one token: in each cell a column per state, as high as its probability. */
function drawMatrix(canvas, layers, token, current) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = Math.max(18, Math.min(34, 300 / layers.length));
  const label = 26;
  const heads = Math.max(...layers.map((layer) => layer.heads));
  const cell = (width - label) / heads;
  canvas.style.height = `${layers.length * height}px`;
  canvas.width = width * ratio;
  canvas.height = layers.length * height * ratio;
  const context = canvas.getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const lightness = colour("--lightness");
  context.scale(ratio, ratio);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  layers.forEach((layer, row) => {
    const top = row * height;
    context.fillStyle = colour("--faint");
    context.fillText(layer.number, 2, top + height / 2);
    for (let head = 0; head < layer.heads; head++) {
      const left = label + head * cell;
      context.fillStyle = colour("--plate");
      context.fillRect(left + 1, top + 1, cell - 3, height - 3);
      if (token >= 0 && layer.has("states")) {
        const step = (cell - 5) / layer.states;
        for (let state = 0; state < layer.states; state++) {
          const p = layer.state(head, token, state);
          context.fillStyle = stateColour(layer, state).replace("var(--lightness)", lightness);
          context.fillRect(left + 2 + state * step, top + height - 3 - p * (height - 6), Math.max(1, step - 0.5), p * (height - 6));
        }
      }
      if (row === current.layer && head === current.head) {
        context.strokeStyle = colour("--accent");
        context.lineWidth = 1.5;
        context.strokeRect(left + 0.5, top + 0.5, cell - 2, height - 2);
      }
    }
  });
  return { height, label, cell };
}

/** A button for each state of the current head: how likely the token makes it, and a tick at the average. */
function stateList(layer, head, token, latent, usage, onPick) {
  const rows = layer.choice(head, token).map((p, state) => {
    const name = layer.isWindow(state) ? "window" : `latent ${layer.label(state)}`;
    const row = make("button", { kind: "row state", type: "button" },
      make("span", { kind: "name", text: name }),
      bar([[p, stateColour(layer, state)]], usage?.[head]?.[state]),
      make("span", { kind: "number", text: number(p) }));
    row.dataset.state = state;
    row.setAttribute("aria-pressed", String(state === latent));
    row.addEventListener("click", () => onPick(state));
    return row;
  });
  const list = make("div", { kind: "rows states" }, ...rows);
  list.style.gridTemplateRows = `repeat(${Math.ceil(rows.length / 2)}, auto)`;
  return list;
}

/** A button for a token in a list; `parts` make its bar, as shares of the longest. */
function tokenRow(texts, token, weight, { parts, from, onSelect }) {
  const name = make("span", { kind: "name" }, quoted(texts[token]));
  if (from !== undefined) name.append(make("small", { text: token === from ? "  itself" : token < from ? `  −${from - token}` : `  +${token - from}` }));
  const row = make("button", { kind: "row attended", type: "button", title: `token ${token}` }, name);
  if (parts) row.append(bar(parts));
  row.append(make("span", { kind: "number", text: number(weight) }));
  row.dataset.token = token;
  row.addEventListener("click", () => onSelect(token));
  return row;
}

/** What a token attends to: the split among states, then the tokens with the largest weights. */
function attendsList(layer, head, token, texts, onSelect) {
  const { weights, rest } = layer.row(head, token);
  const top = largest(weights, TOP).filter((s) => weights[s] > 0);
  const most = weights[top[0]] || 1;
  const rows = top.map((s) => {
    const parts = layer.parts(head, token, s).map((part, state) => [part / most, stateColour(layer, state)]);
    return tokenRow(texts, s, weights[s], { parts, from: token, onSelect });
  });
  const found = [];
  if (layer.states) {
    const choice = layer.choice(head, token);
    const split = make("div", { kind: "split" });
    choice.forEach((p, state) => {
      const part = make("i", { title: `${layer.isWindow(state) ? "window" : `latent ${layer.label(state)}`} ${number(p)}` });
      part.style.width = percent(p);
      part.style.background = stateColour(layer, state);
      split.append(part);
    });
    const local = layer.window ? choice[0] : 0;
    const words = layer.window ? `Window ${number(local)}, latents ${number(1 - local)}.` : "All through latents.";
    found.push(split, make("p", { kind: "key", id: "split-words", text: words }));
  }
  found.push(make("div", { kind: "rows" }, ...rows));
  if (rest > 0.0005) found.push(make("p", { kind: "quiet", id: "rest", text: `Elsewhere in the ${layer.window ? "window" : "text"}, each smaller: ${number(rest)}` }));
  return found;
}

/** What a latent has gathered up to a token, and the tokens that choose it. */
function latentLists(layer, head, state, upTo, texts, onSelect) {
  const gathered = layer.gathered(head, state - (layer.window ? 1 : 0), upTo);
  const chosen = Float64Array.from({ length: layer.tokens }, (_, token) => layer.state(head, token, state));
  const list = (title, weights, id) => make("div", { id },
    make("h3", { text: title }),
    make("div", { kind: "rows" }, ...largest(weights, TOP).map((token) => tokenRow(texts, token, weights[token], { onSelect }))));
  return make("div", { kind: "pair" }, list("It gathers, p(s|l,t)", gathered, "gathers"), list("They choose it, p(l|t)", chosen, "choosers"));
}

const COLUMNS = [
  ["layer", (head) => head.layer],
  ["head", (head) => head.head],
  ["latents in effect", (head) => head.effective?.toFixed(1)],
  ["collapse", (head) => head.collapse?.toFixed(2)],
  ["entropy, nats", (head) => head.entropy?.toFixed(2)],
  ["information, nats", (head) => head.information?.toFixed(2)],
  ["window’s share", (head) => head.window?.toFixed(3)],
  ["latents look back", (head) => head.distance?.toFixed(0)],
  ["90% within", (head) => head.within?.toFixed(0)],
  ["softmax looks back", (head) => head.scoreDistance?.toFixed(1)],
];

/** A row for each head, over the whole text. */
function measuresTable(table, heads, onPick) {
  table.append(make("thead", {}, make("tr", {}, ...COLUMNS.map(([name]) => make("th", { text: name })))));
  const rows = heads.map((head) => {
    const row = make("tr", { tabIndex: 0 }, ...COLUMNS.map(([, value]) => make("td", { text: value(head) === undefined ? "–" : String(value(head)) })));
    if (head.collapsed || head.idle) row.children[3].append(make("span", { kind: "warn", text: head.idle ? " idle" : " collapsed" }));
    if (head.row !== null) {
      row.addEventListener("click", () => onPick(head.row, head.head));
      row.addEventListener("keydown", (event) => { if (event.key === "Enter") onPick(head.row, head.head); });
    }
    return row;
  });
  table.append(make("tbody", {}, ...rows));
}
