// Markdown as elements. The text is a model's: none of it becomes markup, loads or runs anything; HTML in it is shown as text,
// images as links. marked.js reads the text into tokens; only this file makes elements of them.
import { make } from "./dom.js";
import { lexer } from "./marked.js";

const SCHEMES = ["http:", "https:", "mailto:"];
const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function decoded(text) { // the few entities that people write
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,4}));/gi, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = parseInt(decimal ?? hex, decimal ? 10 : 16);
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });
}

function link(address, title, children) { // only whole addresses of harmless kinds can be followed
  const url = URL.canParse(decoded(address)) ? new URL(decoded(address)) : null;
  if (!SCHEMES.includes(url?.protocol)) return make("span", {}, ...children);
  const attributes = { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return make("a", { ...attributes, ...(title ? { title: decoded(title) } : {}) }, ...children);
}

const INLINE = {
  strong: (token) => make("strong", {}, ...inline(token.tokens)),
  em: (token) => make("em", {}, ...inline(token.tokens)),
  del: (token) => make("del", {}, ...inline(token.tokens)),
  codespan: (token) => make("code", {}, token.text),
  br: () => make("br"),
  link: (token) => link(token.href, token.title, inline(token.tokens)),
  image: (token) => link(token.href, token.title, [`[image: ${decoded(token.text) || token.href}]`]),
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  html: (token) => (/^<br *\/?>$/i.test(token.text) ? make("br") : token.text),
  escape: (token) => token.text,
};

function inline(tokens) {
  return tokens.map((token) => {
    if (INLINE[token.type]) return INLINE[token.type](token);
    if (BLOCKS[token.type]) return block(token);
    return token.tokens ? make("span", {}, ...inline(token.tokens)) : decoded(token.text ?? token.raw);
  });
}

function row(cells, tag) {
  return make("tr", {}, ...cells.map((cell) => make(tag, { class: cell.align ?? "" }, ...inline(cell.tokens))));
}

const BLOCKS = {
  heading: (token) => make(`h${Math.min(6, token.depth + 2)}`, {}, ...inline(token.tokens)),
  paragraph: (token) => make("p", {}, ...inline(token.tokens)),
  blockquote: (token) => make("blockquote", {}, ...blocks(token.tokens)),
  hr: () => make("hr"),
  list: (token) => {
    const start = token.ordered ? { start: String(token.start) } : {};
    return make(token.ordered ? "ol" : "ul", start, ...token.items.map((item) => make("li", {}, ...inline(item.tokens))));
  },
  code: (token) => {
    const bar = make("div", { class: "bar" }, token.lang ?? "", make("button", { type: "button", class: "copy-code" }, "Copy"));
    return make("div", { class: "code" }, bar, make("pre", {}, make("code", {}, token.text)));
  },
  table: (token) => {
    const body = make("tbody", {}, ...token.rows.map((cells) => row(cells, "td")));
    return make("div", { class: "wide" }, make("table", {}, make("thead", {}, row(token.header, "th")), body));
  },
};

const block = (token) => BLOCKS[token.type]?.(token) ?? make("p", {}, ...inline([token]));
const shown = (tokens) => tokens.filter((token) => !["space", "def"].includes(token.type));
const blocks = (tokens) => shown(tokens).map(block);

function change(box, tokens) {
  const changed = tokens.findIndex((token, i) => box.children[i]?.raw !== token.raw);
  const first = changed < 0 ? tokens.length : changed;
  const made = tokens.slice(first).map((token) => Object.assign(block(token), { raw: token.raw }));
  while (box.children.length > first) box.lastChild.remove();
  box.append(...made);
}

export function showMarkdown(box, text) { // an element a block; those that are the same as before stay, with what is selected in them
  try {
    change(box, shown(lexer(text, { gfm: true, breaks: true })));
  } catch { // a thousand quotes within each other, say
    change(box, [{ type: "text", text, raw: text }]);
  }
}
