// The API's document as a page. Knows OpenAPI's form. Does not know what the paths do.
import { recall, remember } from "./chats.js";
import { $, make } from "./dom.js";
import { apiDocument } from "./stream.js";

const TAB = "sessionStorage";
const nameOf = (schema) => schema.$ref.split("/").at(-1);

function typeOf(schema) { // -> what to write for it, a link where it is a body of its own
  if (schema.$ref) return [make("a", { href: `#${nameOf(schema)}` }, nameOf(schema))];
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return choices.flatMap((choice, i) => [...(i ? [" or "] : []), ...typeOf(choice)]);
  if (schema.type === "array") return ["list of ", ...typeOf(schema.items ?? {})];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" or ")];
  return ["const" in schema ? JSON.stringify(schema.const) : schema.type ?? "anything"];
}

function limitsOf(schema) { // what a value must keep to, in words
  const of = [schema, ...(schema.anyOf ?? [])], first = (name) => of.map((one) => one[name]).find((value) => value !== undefined);
  const words = {
    minimum: "at least", exclusiveMinimum: "above", maximum: "at most", exclusiveMaximum: "below",
    maxLength: "characters at most", maxItems: "items at most", default: "default",
  };
  return Object.entries(words).filter(([name]) => (first(name) ?? null) !== null).map(([name, text]) => `${text} ${JSON.stringify(first(name))}`).join(", ");
}

function fieldsTable(schema) {
  const row = ([name, field]) => {
    const needed = schema.required?.includes(name) ? "required" : limitsOf(field);
    return make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, ...typeOf(field)), make("td", {}, needed));
  };
  return make("div", { class: "wide" }, make("table", {}, make("tbody", {}, ...Object.entries(schema.properties ?? {}).map(row))));
}

function pathSection([path, methods]) {
  const parts = Object.entries(methods).flatMap(([method, operation]) => {
    const bodies = Object.values(operation.requestBody?.content ?? {}).map((content) => make("p", {}, "Body: ", ...typeOf(content.schema ?? {})));
    const asked = (operation.parameters ?? []).map((one) => make("p", {}, `In the ${one.in}: ${one.name}, `, ...typeOf(one.schema ?? {})));
    return [make("h3", {}, `${method.toUpperCase()} ${path}`), make("p", { class: "said" }, operation.description ?? operation.summary ?? ""), ...asked, ...bodies];
  });
  return make("section", { id: path }, ...parts);
}

function modelSection([name, schema]) {
  const about = schema.description ? [make("p", { class: "said" }, schema.description)] : [];
  const content = schema.properties ? fieldsTable(schema) : make("p", {}, ...typeOf(schema));
  return make("section", { id: name }, make("h3", {}, name), ...about, content);
}

function show(api) {
  const paths = Object.entries(api.paths), models = Object.entries(api.components?.schemas ?? {});
  $("version").textContent = api.info.version;
  $("contents").replaceChildren(make("ul", {}, ...paths.map(([path]) => make("li", {}, make("a", { href: `#${path}` }, path)))));
  $("paths").replaceChildren(...paths.map(pathSection));
  $("models").replaceChildren(...models.map(modelSection));
  if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
}

async function load() {
  $("error").hidden = true;
  try {
    show(await apiDocument($("key").value.trim()));
    $("locked").hidden = true;
  } catch (error) {
    $("error").textContent = error.message;
    $("error").hidden = false;
    $("locked").hidden = error.status !== 401;
  }
}

document.documentElement.dataset.theme = recall("theme", "");
$("key").value = recall("key", "", TAB);
$("key").addEventListener("change", () => { remember("key", $("key").value, TAB); load(); });
load();
