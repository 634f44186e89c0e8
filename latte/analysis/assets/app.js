"use strict";
// What is chosen, and what happens when a person chooses something else.

class Report {
  constructor(meta) {
    this.meta = meta;
    this.texts = meta.texts;
    this.layers = meta.layers.map((layer) => new Layer(layer, meta.texts.length));
    this.layer = meta.start.layer;
    this.head = meta.start.head;
    this.pointed = -1; // the token under the pointer
    this.cursor = 0; // the token that the keys have moved to
    this.selected = -1; // the token that was clicked
    this.latent = -1; // the state that was clicked
    this.node = Object.fromEntries([...document.querySelectorAll("[id]")].map((node) => [node.id, node]));
    this.fillHeader();
    this.view = new TextView(this.node.text, this.texts, {
      onPoint: (token) => this.point(token),
      onSelect: (token) => token >= 0 && this.select(token),
    });
    measuresTable(this.node.measures, meta.heads, (layer, head) => this.go(layer, head));
    this.listen();
    this.refresh();
  }

  get current() {
    return this.layers[this.layer];
  }

  fillHeader() {
    const { meta, node } = this;
    node.about.textContent = meta.about;
    node.notes.textContent = meta.notes.join(" ");
    node.goto.max = this.texts.length - 1;
    this.layers.forEach((layer, row) => node.layer.append(make("option", { value: row, text: layer.number })));
    this.fillHeads();
  }

  fillHeads() {
    const options = Array.from({ length: this.current.heads }, (_, head) => make("option", { value: head, text: String(head) }));
    this.node.head.replaceChildren(...options);
    this.node.layer.value = this.layer;
    this.node.head.value = this.head;
  }

  listen() {
    const { node } = this;
    node.layer.addEventListener("change", () => this.go(Number(node.layer.value), this.head));
    node.head.addEventListener("change", () => this.go(this.layer, Number(node.head.value)));
    node.goto.addEventListener("change", () => {
      const token = Number(node.goto.value);
      if (Number.isInteger(token) && token >= 0 && token < this.texts.length) this.select(token, true);
    });
    node.theme.addEventListener("click", () => this.changeTheme());
    node["help-button"].addEventListener("click", () => node.help.showModal());
    node.text.addEventListener("keydown", (event) => this.move(event));
    document.addEventListener("keydown", (event) => this.shortcut(event));
    node.matrix.addEventListener("click", (event) => this.pickCell(event));
    window.addEventListener("resize", () => this.showMatrix());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.showMatrix());
  }

  async go(layer, head) {
    this.layer = Math.min(this.layers.length - 1, Math.max(0, layer));
    this.head = Math.min(this.current.heads - 1, Math.max(0, head));
    if (this.latent >= this.current.states) this.latent = -1;
    this.fillHeads();
    await this.refresh();
  }

  point(token) {
    if (token === this.pointed) return;
    this.pointed = token;
    this.showToken();
  }

  async select(token, reveal = false) {
    this.selected = this.selected === token && !reveal ? -1 : token;
    this.cursor = token;
    this.view.mark(this.cursor, this.selected);
    if (reveal) this.view.reveal(token);
    await this.refresh();
  }

  async pickState(state) {
    this.latent = this.latent === state || this.current.isWindow(state) ? -1 : state;
    await this.refresh();
    if (this.latent >= 0) this.node["latent-card"].scrollIntoView({ block: "nearest" });
  }

  letGo() {
    this.selected = this.latent = -1;
    this.view.mark(this.cursor, -1);
    this.refresh();
  }

  /** Show everything anew, with what has to be unpacked first. */
  async refresh() {
    const { current } = this;
    await current.load("states");
    if (this.selected >= 0 || this.latent >= 0) await current.loadAll();
    if (current !== this.current) return; // another layer was chosen meanwhile
    this.showToken();
    this.showAttends();
    this.showLatent();
    this.shade();
    for (const row of this.node.measures.tBodies[0].rows) {
      row.classList.toggle("current", row.cells[0].textContent === current.number && row.cells[1].textContent === String(this.head));
    }
  }

  get shown() {
    return this.pointed >= 0 ? this.pointed : this.selected >= 0 ? this.selected : this.cursor;
  }

  showMatrix() {
    this.grid = drawMatrix(this.node.matrix, this.layers, this.shown, { layer: this.layer, head: this.head });
  }

  showToken() {
    const { node, current, shown } = this;
    node["token-title"].replaceChildren(`Token ${shown} `, quoted(this.texts[shown]));
    if (!this.layers.some((layer) => layer.states)) {
      node.matrix.hidden = true;
      node.states.replaceChildren(make("p", { kind: "quiet", text: "This model has no latents: there is no p(l|t). Click a token to see what it attends to." }));
      return;
    }
    this.showMatrix();
    if (!current.states || !current.has("states")) {
      node.states.replaceChildren(make("p", { kind: "quiet", text: current.states ? "Unpacking …" : "This layer has no latents." }));
      return;
    }
    const list = stateList(current, this.head, shown, this.latent, current.usage, (state) => this.pickState(state));
    const active = node.states.contains(document.activeElement) ? document.activeElement.dataset.state : undefined;
    node.states.replaceChildren(list);
    if (active !== undefined) list.children[active]?.focus();
  }

  showAttends() {
    const { node, current, selected } = this;
    if (selected < 0) {
      node["attends-title"].textContent = "What it attends to";
      node.attends.replaceChildren(make("p", { kind: "quiet", text: "Click a token, or press Enter on it." }));
      return;
    }
    node["attends-title"].replaceChildren(`Token ${selected} `, quoted(this.texts[selected]), " attends to");
    node.attends.replaceChildren(...attendsList(current, this.head, selected, this.texts, (token) => this.select(token, true)));
  }

  showLatent() {
    const { node, current, latent } = this;
    if (latent < 0) {
      node["latent-title"].textContent = "What a latent gathers";
      const words = current.states ? "Click a latent in the list above." : "This layer has no latents.";
      node.latent.replaceChildren(make("p", { kind: "quiet", text: words }));
      return;
    }
    node["latent-title"].textContent = `Latent ${current.label(latent)}, up to token ${this.upTo}`;
    node.latent.replaceChildren(latentLists(current, this.head, latent, this.upTo, this.texts, (token) => this.select(token, true)));
  }

  /** The token up to which a latent has gathered. */
  get upTo() {
    return this.selected >= 0 ? this.selected : this.texts.length - 1;
  }

  /** Colour the text by what is chosen: a latent, a token, or nothing. */
  shade() {
    const { current, head, latent, selected, node } = this;
    const where = `layer ${current.number}, head ${head}`;
    const heat = (weights) => {
      let most = 0;
      for (const weight of weights) most = Math.max(most, weight);
      return (token) => token < weights.length ? `hsl(var(--heat) / ${(0.75 * Math.sqrt(weights[token] / most)).toFixed(3)})` : "";
    };
    if (latent >= 0) {
      node.legend.replaceChildren(make("b", { text: `What latent ${current.label(latent)} gathers` }), ` up to token ${this.upTo}, ${where}`);
      this.view.paint(heat(current.gathered(head, latent - (current.window ? 1 : 0), this.upTo)));
    } else if (selected >= 0) {
      node.legend.replaceChildren(make("b", { text: `What token ${selected} attends to` }), `, ${where}`);
      this.view.paint(heat(current.row(head, selected).weights));
    } else if (current.states) {
      node.legend.replaceChildren(make("b", { text: "The likeliest state of each token" }), `, ${where}; grey is the window`);
      this.view.paint((token) => this.likeliest(token));
    } else {
      node.legend.textContent = "This layer has no latents. Click a token to see what it attends to.";
      this.view.paint(() => "");
    }
  }

  likeliest(token) {
    const choice = this.current.choice(this.head, token);
    const state = largest(choice, 1)[0];
    return stateColour(this.current, state, (0.6 * choice[state]).toFixed(3));
  }

  /** Arrows and their like, within the text. */
  move(event) {
    const { view, cursor } = this;
    const targets = {
      ArrowRight: () => cursor + 1, ArrowLeft: () => cursor - 1, Home: () => 0, End: () => this.texts.length - 1,
      ArrowDown: () => view.vertical(cursor, 1), ArrowUp: () => view.vertical(cursor, -1),
      PageDown: () => view.vertical(cursor, view.page), PageUp: () => view.vertical(cursor, -view.page),
    };
    if (event.key === "Enter" || event.key === " ") this.select(cursor);
    else if (event.key in targets) {
      this.cursor = Math.min(this.texts.length - 1, Math.max(0, targets[event.key]()));
      this.pointed = -1;
      view.reveal(this.cursor);
      view.mark(this.cursor, this.selected);
      this.pointed = this.cursor;
      this.showToken();
    } else return;
    event.preventDefault();
  }

  /** Keys that work everywhere but in a field. */
  shortcut(event) {
    if (event.target.matches("input, select") || this.node.help.open || event.ctrlKey || event.metaKey || event.altKey) return;
    const actions = {
      "[": () => this.go(this.layer - 1, this.head), "]": () => this.go(this.layer + 1, this.head),
      ",": () => this.go(this.layer, this.head - 1), ".": () => this.go(this.layer, this.head + 1),
      Escape: () => this.letGo(), t: () => this.changeTheme(), "?": () => this.node.help.showModal(),
    };
    actions[event.key]?.();
  }

  pickCell(event) {
    const { height, label, cell } = this.grid;
    const layer = Math.floor(event.offsetY / height);
    const head = Math.floor((event.offsetX - label) / cell);
    if (head >= 0) this.go(layer, head);
  }

  changeTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    this.showMatrix();
  }

  /** Unpack the choices of all layers, one after another, and show each as it comes. */
  async loadChoices() {
    for (const layer of this.layers) {
      await layer.load("states");
      this.showToken();
    }
  }
}

async function start() {
  const report = new Report(JSON.parse(document.getElementById("meta").textContent));
  window.report = report;
  await report.loadChoices();
  document.documentElement.dataset.ready = "true";
}
