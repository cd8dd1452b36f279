// Making elements, and finding those of the page. Strings become attributes and text nodes, never markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const make = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const draw = (tag, attributes = {}, ...children) => filled(document.createElementNS(SVG, tag), attributes, children);
export const number = (value, digits = 1) => (Number.isFinite(value) ? value.toFixed(digits) : "–");
