"use strict";
// The text, of which only the lines in sight are in the page.

const LINE = 22; // pixels, as in the style sheet
const MARGIN = 12; // lines kept ready above and below
const GUTTER = 76; // pixels before a line, for numbers

/** How many columns a letter takes in a font of equal widths. */
function columnsOf(text) {
  let columns = 0;
  for (const letter of text) columns += /[ᄀ-ᅟ⺀-꓏가-힣豈-﫿︰-﹏＀-｠￠-￦]|[\u{1F300}-\u{1FAFF}\u{20000}-\u{3FFFD}]/u.test(letter) ? 2 : 1;
  return columns;
}

/** A token's text in pieces for one line each: [text, whether it is a mark, whether the line ends after it]. */
function pieces(text) {
  if (text === "") return [["·", true, false]];
  const found = [];
  text.split(/(\n)/).forEach((part) => {
    if (part === "\n") found.push(["↵", true, true]);
    else if (part !== "") found.push([part.replace(/\t/g, "→   ").replace(/[\u0000-\u001f\u007f-\u009f\u202a-\u202e\u2066-\u2069]/g, "�"), false, false]);
  });
  return found;
}

class TextView {
  constructor(root, texts, { onPoint, onSelect }) {
    this.root = root;
    this.texts = texts;
    this.sheet = root.appendChild(document.createElement("div"));
    this.sheet.className = "sheet";
    this.lines = new Map();
    this.colour = () => "";
    this.cursor = -1;
    this.selected = -1;
    root.addEventListener("scroll", () => this.render(), { passive: true });
    root.addEventListener("pointerover", (event) => onPoint(this.tokenOf(event.target)));
    root.addEventListener("pointerleave", () => onPoint(-1));
    root.addEventListener("click", (event) => onSelect(this.tokenOf(event.target)));
    new ResizeObserver(() => this.resize()).observe(root);
    this.resize();
  }

  tokenOf(node) {
    const span = node.closest?.(".token");
    return span ? Number(span.dataset.token) : -1;
  }

  /** Break the text into lines as wide as the view. */
  resize() {
    const context = document.createElement("canvas").getContext("2d");
    const style = getComputedStyle(this.root);
    context.font = `${style.fontSize} ${style.fontFamily}`;
    const width = this.root.clientWidth - GUTTER - 16;
    const columns = Math.max(16, Math.floor(width / context.measureText("0").width));
    if (columns === this.columns) return this.render();
    const top = this.firstToken();
    this.columns = columns;
    this.breakLines();
    this.sheet.style.height = `${this.starts.length * LINE + 8}px`;
    this.sheet.replaceChildren();
    this.lines.clear();
    if (top > 0) this.root.scrollTop = this.lineOf[top] * LINE;
    this.render();
  }

  breakLines() {
    this.segments = []; // [token, text, whether it is a mark]
    this.starts = [0]; // of each line, its first segment
    this.lineOf = new Int32Array(this.texts.length); // of each token
    let column = 0;
    const newLine = () => { this.starts.push(this.segments.length); column = 0; };
    this.texts.forEach((text, token) => {
      pieces(text).forEach(([piece, mark, last], number) => {
        let width = columnsOf(piece);
        if (column > 0 && column + width > this.columns) newLine();
        if (number === 0) this.lineOf[token] = this.starts.length - 1;
        while (width > this.columns) { // longer than a line
          this.segments.push([token, piece.slice(0, this.columns), mark]);
          piece = piece.slice(this.columns);
          width = columnsOf(piece);
          newLine();
        }
        this.segments.push([token, piece, mark]);
        column += width;
        if (last) newLine();
      });
    });
    if (this.starts.length > 1 && this.starts.at(-1) === this.segments.length) this.starts.pop();
  }

  firstToken() {
    if (!this.starts) return 0;
    const line = Math.min(this.starts.length - 1, Math.floor(this.root.scrollTop / LINE));
    return this.segments[this.starts[line]][0];
  }

  /** Put the lines in sight into the page, and take the others out. */
  render() {
    const first = Math.max(0, Math.floor(this.root.scrollTop / LINE) - MARGIN);
    const end = Math.min(this.starts.length, Math.ceil((this.root.scrollTop + this.root.clientHeight) / LINE) + MARGIN);
    for (const [number, line] of this.lines) {
      if (number < first || number >= end) { line.remove(); this.lines.delete(number); }
    }
    const fresh = document.createDocumentFragment();
    for (let number = first; number < end; number++) {
      if (this.lines.has(number)) continue;
      const line = this.makeLine(number);
      this.lines.set(number, line);
      fresh.append(line);
    }
    this.sheet.append(fresh);
  }

  makeLine(number) {
    const line = document.createElement("div");
    line.className = "line";
    line.style.top = `${number * LINE + 4}px`;
    const stop = this.starts[number + 1] ?? this.segments.length;
    for (let i = this.starts[number]; i < stop; i++) {
      const [token, text, mark] = this.segments[i];
      if (i === this.starts[number]) line.dataset.first = token;
      const span = document.createElement("span");
      span.className = "token";
      span.dataset.token = token;
      span.setAttribute("role", "option");
      if (i === 0 || this.segments[i - 1][0] !== token) span.id = `token-${token}`;
      if (mark) span.appendChild(document.createElement("span")).className = "mark";
      (mark ? span.firstChild : span).textContent = text;
      this.dress(span, token);
      line.append(span);
    }
    return line;
  }

  dress(span, token) {
    span.style.backgroundColor = this.colour(token);
    span.classList.toggle("cursor", token === this.cursor);
    span.classList.toggle("selected", token === this.selected);
    span.setAttribute("aria-selected", String(token === this.selected));
  }

  /** Colour all tokens by a function from a token's number. */
  paint(colour) {
    this.colour = colour;
    this.repaint();
  }

  repaint() {
    for (const span of this.sheet.querySelectorAll(".token")) this.dress(span, Number(span.dataset.token));
  }

  mark(cursor, selected) {
    this.cursor = cursor;
    this.selected = selected;
    this.repaint();
    if (cursor >= 0) this.root.setAttribute("aria-activedescendant", `token-${cursor}`);
  }

  /** Scroll as far as needed for a token to be in sight. */
  reveal(token) {
    const top = this.lineOf[token] * LINE;
    const { scrollTop, clientHeight } = this.root;
    if (top < scrollTop) this.root.scrollTop = top - LINE;
    else if (top + 2 * LINE > scrollTop + clientHeight) this.root.scrollTop = top - clientHeight + 3 * LINE;
    this.render();
  }

  /** The token about as far right, some lines up or down. */
  vertical(token, lines) {
    const line = this.lineOf[token];
    const target = Math.min(this.starts.length - 1, Math.max(0, line + lines));
    const place = this.columnOf(line, token);
    let best = this.segments[this.starts[target]][0];
    const stop = this.starts[target + 1] ?? this.segments.length;
    for (let i = this.starts[target]; i < stop; i++) {
      if (this.columnOf(target, this.segments[i][0]) <= place) best = this.segments[i][0];
    }
    return best;
  }

  columnOf(line, token) {
    let column = 0;
    for (let i = this.starts[line]; i < this.segments.length && this.segments[i][0] < token; i++) column += columnsOf(this.segments[i][1]);
    return column;
  }

  get page() {
    return Math.max(1, Math.floor(this.root.clientHeight / LINE) - 2);
  }
}
