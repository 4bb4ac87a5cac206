"use strict";
// The explorer. `page.stored` holds everything in a static file; otherwise the server computes it when it is needed.
const page = JSON.parse(document.getElementById("data").textContent);
const find = (selector, root = document) => root.querySelector(selector);
const percent = (value) => `${(100 * value).toFixed(value < 0.0995 ? 1 : 0)}%`;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

function showMessage(text) {
  find("#message").textContent = text;
  find("#message").hidden = !text;
}

// ---- Where predictions and maps come from: both have the same functions.

const decode = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

const server = {
  async get(path, parameters) {
    const response = await fetch(`/api/${path}?${new URLSearchParams(parameters)}`);
    const content = await response.json();
    if (!response.ok) throw new Error(content.error);
    return content;
  },
  view: async (model, image) => `/api/view?${new URLSearchParams({ model, image })}`,
  predictions: async (model, image) => (await server.get("predictions", { model, image })).predictions,
  async attention(model, image, layer, query) {
    const { maps, peaks, prefix } = await server.get("attention", { model, image, layer: layer.layer, query });
    return split(decode(maps), peaks, prefix);
  },
  async relevance(model, image, method, target) {
    const { maps, peaks } = await server.get("map", { model, image, method, class: target });
    return split(decode(maps), peaks, [])[0];
  },
  canExplain: () => true,
  thumbnail: (row) => `/api/thumbnails/${row}`,
  async upload(files) {
    const form = new FormData();
    for (const file of files) form.append("images", file);
    const response = await fetch("/api/images", { method: "POST", body: form });
    const content = await response.json();
    if (!response.ok) throw new Error(content.error);
    return content.images;
  },
};

const file = {
  entry: (model, image) => page.stored.images[Number(image.slice(1))][model],
  async block(entry) {
    if (!entry.bytes) {
      const stream = new Blob([decode(entry.block)]).stream().pipeThrough(new DecompressionStream("gzip"));
      entry.bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    }
    return entry.bytes;
  },
  view: async (model, image) => page.stored.views[file.entry(model, image).view],
  predictions: async (model, image) => file.entry(model, image).predictions,
  async attention(model, image, layer, query) {
    const entry = file.entry(model, image), bytes = await file.block(entry);
    const [, start, queries] = entry.attention.find(([number]) => number === layer.layer);
    const row = query < 0 ? Math.min(-1 - query, queries - 1) : layer.pooling ? 0 : query + layer.prefix;
    const patches = page.models[model].grid[0] * page.models[model].grid[1], count = queries * layer.heads;
    const numbers = new DataView(bytes.buffer, bytes.byteOffset + start);
    const read = (offset) => Array.from({ length: layer.heads }, (_, head) => numbers.getFloat32(4 * (offset + row * layer.heads + head), true));
    const values = start + 8 * count + row * layer.heads * patches;
    return split(bytes.subarray(values, values + layer.heads * patches), read(0), read(count));
  },
  map: (entry, method, target) => entry.maps.find(([name, own]) => name === method && (own === -1 || own === target)),
  async relevance(model, image, method, target) {
    const entry = file.entry(model, image), [, , start, peak] = file.map(entry, method, target);
    const patches = page.models[model].grid[0] * page.models[model].grid[1];
    return split((await file.block(entry)).subarray(start, start + patches), [peak], [])[0];
  },
  // Of a pooling with a query per class, the attention of the most probable class is stored.
  canExplain(model, image, method, target) {
    const entry = file.entry(model, image), stored = method === "attention" && page.models[model].layers.length > 0;
    return stored ? target === entry.predictions[0]?.[0] : Boolean(file.map(entry, method, target));
  },
  thumbnail: (row) => page.stored.views[page.stored.images[row][0].view],
};

const source = page.stored ? file : server;

// Bytes of several maps to a list of { values: 0 ... 1 relative to the peak, peak, prefix }.
function split(bytes, peaks, prefix) {
  const size = bytes.length / peaks.length;
  return peaks.map((peak, index) => ({
    values: Float32Array.from(bytes.subarray(index * size, (index + 1) * size), (value) => value / 255),
    peak,
    prefix: prefix[index] || 0,
  }));
}

function mean(maps) {
  if (maps.length === 1) return maps[0];
  const values = new Float32Array(maps[0].values.length);
  for (const map of maps) map.values.forEach((value, index) => { values[index] += value * map.peak / maps.length; });
  const peak = values.reduce((largest, value) => Math.max(largest, value), 1e-12);
  return { values: values.map((value) => value / peak), peak, prefix: maps.reduce((sum, map) => sum + map.prefix, 0) / maps.length };
}

// A relevance map with its lowest value at 0: only differences matter.
function stretch(map) {
  const low = map.values.reduce((least, value) => Math.min(least, value), 1);
  return { ...map, values: map.values.map((value) => (low < 1 ? (value - low) / (1 - low) : 0)) };
}

// ---- Heat maps.

const ANCHORS = [[8, 8, 14], [56, 22, 22], [126, 44, 18], [196, 84, 12], [242, 140, 26], [254, 200, 80], [255, 246, 200]];
const COLORS = Array.from({ length: 256 }, (_, index) => {
  const place = index / 255 * (ANCHORS.length - 1), low = Math.min(Math.floor(place), ANCHORS.length - 2);
  return ANCHORS[low].map((value, channel) => value + (ANCHORS[low + 1][channel] - value) * (place - low));
});

// A canvas with one pixel per patch; `alpha` is the opacity of a value.
function paint(canvas, map, [rows, columns], alpha) {
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  map.values.forEach((value, index) => {
    image.data.set(COLORS[Math.round(255 * value)], 4 * index);
    image.data[4 * index + 3] = 255 * alpha(value);
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

// ---- A panel: one model.

const shared = { image: null, x: 0.5, y: 0.5, token: null, kept: false };
const panels = [];

class Panel {
  constructor(number, info) {
    this.number = number;
    this.info = info;
    this.root = find("#panel").content.firstElementChild.cloneNode(true);
    this.canvas = find(".figure canvas", this.root);
    this.canvas.style.aspectRatio = info.aspect;
    this.cache = new Map();
    this.predictions = [];
    this.target = -1;
    this.layer = Math.floor(info.layers.length / 2);
    this.head = 0;
    this.strength = 0.7;
    this.method = info.layers.length ? "attention" : info.methods[0].name;
    find("h2", this.root).textContent = info.title;
    find(".subtitle", this.root).textContent = info.subtitle;
    const reason = find(".reason", this.root);
    reason.textContent = info.reason;
    reason.hidden = !info.reason;
    this.makeMethods();
    this.makeSliders();
    this.listen();
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    find("#panels").append(this.root);
  }

  makeMethods() {
    const attention = { name: "attention", title: this.info.reason ? "Attention of the class" : "Attention of a patch", description: "" };
    // The attention of the last layer is one of the sliders' positions.
    const methods = this.info.layers.length ? [attention, ...this.info.methods.filter(({ name }) => name !== "attention")] : this.info.methods;
    this.methods = new Map(methods.map((method) => [method.name, method]));
    for (const { name, title, description } of methods) {
      const button = make("button", { type: "button", title: description }, title);
      button.dataset.method = name;
      button.addEventListener("click", () => this.change((panel) => { if (panel.methods.has(name)) panel.method = name; }));
      find(".methods", this.root).append(button);
    }
  }

  makeSliders() {
    const slider = (name, limit, value, set) => {
      const input = find(`.${name} input`, this.root);
      if (limit !== null) input.max = limit;
      input.value = value;
      input.addEventListener("input", () => this.change((panel) => set(panel, Number(input.value))));
      return input;
    };
    this.blockSlider = slider("block", this.info.layers.length - 1, this.layer, (panel, value) => panel.setLayer(value, this));
    const names = this.info.layers.reduce((longest, { tokens }) => (tokens.length > longest.length ? tokens : longest), []);
    find(".query", this.root).append(...["patch", ...names].map((name, index) => {
      const button = make("button", { type: "button" }, name[0].toUpperCase() + name.slice(1));
      button.addEventListener("click", () => { shared.token = index ? index - 1 : null; updateAll(); });
      return button;
    }));
    this.headSlider = slider("head", 0, 0, (panel, value) => panel.setHead(value));
    slider("strength", null, 70, (panel, value) => { panel.strength = value / 100; });
  }

  get current() { return this.info.layers[this.layer]; }

  // Whether the map is the attention of the layer of the slider; without layers, "attention" is a method like others.
  get patchwise() { return this.method === "attention" && this.info.layers.length > 0; }

  // The class that the map explains: the chosen one, or the most probable if there is no map of the chosen one.
  get explained() {
    const top = this.predictions.length ? this.predictions[0][0] : -1;
    return this.target >= 0 && source.canExplain(this.number, shared.image, this.method, this.target) ? this.target : top;
  }

  // Apply a change of the controls here and, if the panels are linked, in the other one.
  change(apply, spoken = false) {
    for (const panel of find("#link").checked ? panels : [this]) {
      apply(panel);
      panel.update(spoken && panel === this);
    }
  }

  // `from` is the panel whose slider has this value: models of other depth use the same relative depth.
  setLayer(value, from = this) {
    const last = this.info.layers.length - 1, scale = from === this ? 1 : last / Math.max(from.info.layers.length - 1, 1);
    this.layer = Math.max(clamp(Math.round(value * scale), 0, last), 0);
    this.setHead(this.head);
  }

  setHead(value) {
    const count = this.current?.heads ?? 1;
    this.head = clamp(value, 0, count === 1 ? 0 : count);
  }

  listen() {
    const point = (event) => {
      const box = this.canvas.getBoundingClientRect();
      movePatch((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
    };
    this.canvas.addEventListener("pointermove", (event) => { if (!shared.kept && event.pointerType !== "touch") point(event); });
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "touch") shared.kept = !shared.kept;
      point(event);
    });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    const [rows, columns] = this.info.grid;
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const blocks = { PageUp: 1, PageDown: -1 }, heads = { "[": -1, "]": 1 };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) {
      const [right, down] = moves[event.key], { row, column } = this.patch();
      shared.kept = true;
      movePatch((clamp(column + right, 0, columns - 1) + 0.5) / columns, (clamp(row + down, 0, rows - 1) + 0.5) / rows, true);
    } else if (event.key === "Home" && this.tokens.length) {
      shared.token = this.token === null ? 0 : (this.token + 1) % this.tokens.length;
      updateAll(true);
    } else if (event.key === "Enter") {
      shared.kept = !shared.kept;
    } else if (blocks[event.key] && this.current) {
      const layer = clamp(this.layer + blocks[event.key], 0, this.info.layers.length - 1);
      this.change((panel) => panel.setLayer(layer, this), true);
    } else if (heads[event.key] && this.current) {
      const head = this.head + heads[event.key];
      this.change((panel) => panel.setHead(head), true);
    } else return;
    event.preventDefault();
  }

  patch() {
    const [rows, columns] = this.info.grid;
    const row = clamp(Math.floor(shared.y * rows), 0, rows - 1), column = clamp(Math.floor(shared.x * columns), 0, columns - 1);
    return { row, column, index: row * columns + column };
  }

  async open() {
    this.target = -1;
    this.map = this.maps = this.photo = null;
    const key = shared.image, loading = find(".loading", this.root);
    loading.hidden = false;
    try {
      const predictions = await source.predictions(this.number, key);
      const photo = new Image();
      photo.src = await source.view(this.number, key);
      await photo.decode();
      if (key !== shared.image) return;
      [this.predictions, this.photo] = [predictions, photo];
      this.makePredictions();
      await this.update();
    } finally {
      if (key === shared.image) loading.hidden = true;
    }
  }

  // Fetch the map that the controls ask for and draw it; while one is fetched, only the latest further wish is kept.
  async update(spoken = false) {
    this.showControls();
    this.spoken ||= spoken;
    this.wanted = true;
    if (this.busy || !this.photo) return;
    this.busy = true;
    const loading = find(".loading", this.root), slow = setTimeout(() => { loading.hidden = false; }, 250);
    try {
      while (this.wanted) {
        this.wanted = false;
        const key = shared.image, { method, layer } = this;
        const maps = await this.fetchMaps();
        if (key !== shared.image || method !== this.method || layer !== this.layer) continue;
        this.maps = maps;
        this.map = !this.patchwise ? stretch(maps[0]) : this.head ? maps[this.head - 1] : mean(maps);
        this.showControls();
        this.draw();
        this.describe();
      }
    } catch (error) {
      showMessage(error.message);
    } finally {
      this.busy = false;
      clearTimeout(slow);
      loading.hidden = true;
    }
  }

  async fetchMaps() {
    const attention = this.patchwise, target = this.explained;
    const query = this.token !== null ? -1 - this.token : this.current?.pooling ? target : this.patch().index;
    const key = `${shared.image} ${attention ? `${this.layer} ${query}` : `${this.method} ${target}`}`;
    if (!this.cache.has(key)) {
      const maps = attention
        ? await source.attention(this.number, shared.image, this.current, query)
        : [await source.relevance(this.number, shared.image, this.method, target)];
      if (this.cache.size > 1000) this.cache.clear();
      this.cache.set(key, maps);
    }
    return this.cache.get(key);
  }

  // The tokens of this layer that can be chosen: a pooling with one query has no choice.
  get tokens() { return this.current && !(this.current.pooling && this.current.tokens.length < 2) ? this.current.tokens : []; }

  // The number of the chosen one of them, null for a patch.
  get token() {
    const chosen = shared.token ?? (this.current?.pooling ? 0 : null);
    return this.tokens.length && chosen !== null ? Math.min(chosen, this.tokens.length - 1) : null;
  }

  showControls() {
    const attention = this.patchwise;
    for (const button of find(".methods", this.root).children) {
      button.setAttribute("aria-pressed", button.dataset.method === this.method);
    }
    find(".block", this.root).hidden = find(".heads", this.root).hidden = !attention;
    find(".head", this.root).hidden = !attention || this.current.heads === 1;
    find(".query", this.root).hidden = !attention || !this.tokens.length;
    [...find(".query", this.root).children].forEach((button, index) => {
      button.hidden = index ? index > this.tokens.length : Boolean(this.current?.pooling);
      button.setAttribute("aria-pressed", (this.token ?? -1) === index - 1);
    });
    find(".strength output", this.root).textContent = percent(this.strength);
    if (attention) {
      this.blockSlider.value = this.layer;
      this.headSlider.max = this.current.heads;
      this.headSlider.value = this.head;
      const head = this.head ? `${this.head} of ${this.current.heads}` : "mean";
      for (const [slider, text] of [[this.blockSlider, this.current.title], [this.headSlider, head]]) {
        slider.setAttribute("aria-valuetext", text);
        slider.nextElementSibling.textContent = text;
      }
    }
    this.showHeads(attention);
    this.showPredictions();
  }

  showHeads(attention) {
    const box = find(".heads", this.root), count = attention && this.maps && this.maps.length > 1 ? this.maps.length + 1 : 0;
    while (box.children.length > count) box.lastChild.remove();
    while (box.children.length < count) {
      const head = box.children.length;
      const button = make("button", { type: "button" }, make("canvas"), make("span", {}, head ? String(head) : "mean"));
      button.setAttribute("aria-label", head ? `Head ${head}` : "Mean of the heads");
      button.addEventListener("click", () => this.change((panel) => panel.setHead(head)));
      box.append(button);
    }
    [...box.children].forEach((button, head) => {
      button.setAttribute("aria-pressed", head === this.head);
      paint(button.firstChild, head ? this.maps[head - 1] : mean(this.maps), this.info.grid, () => 1);
    });
  }

  makePredictions() {
    find("h3", this.root).hidden = !this.predictions.length;
    find(".predictions", this.root).replaceChildren(...this.predictions.map(([index, name, probability]) => {
      const badge = shared.label === name ? [" ", make("span", { className: "badge right" }, "label")] : [];
      const button = make("button", { type: "button" }, make("span", {}, name, ...badge), make("span", {}, percent(probability)));
      button.style.setProperty("--share", `${100 * probability}%`);
      button.addEventListener("click", () => { this.target = index; this.update(); });
      return make("li", {}, button);
    }));
  }

  showPredictions() {
    const perClass = this.patchwise ? this.current.pooling : this.methods.get(this.method).per_class, shown = this.explained;
    [...find(".predictions", this.root).children].forEach(({ firstChild: button }, rank) => {
      const [index, name] = this.predictions[rank];
      button.disabled = !perClass || !source.canExplain(this.number, shared.image, this.method, index);
      button.title = button.disabled ? "" : `Show the map for ${name}`;
      button.setAttribute("aria-pressed", Boolean(perClass) && index === shown);
    });
  }

  draw() {
    const { canvas } = this, box = canvas.getBoundingClientRect();
    const width = canvas.width = Math.round(clamp(box.width * devicePixelRatio, 1, 1600));
    const height = canvas.height = Math.round(width / this.info.aspect);
    const context = canvas.getContext("2d");
    if (!this.photo) return;
    context.imageSmoothingQuality = "high";
    context.drawImage(this.photo, 0, 0, width, height);
    if (!this.map) return;
    const heat = paint(this.heat ||= document.createElement("canvas"), this.map, this.info.grid, (value) => this.strength * (1 - 0.55 * value));
    context.imageSmoothingEnabled = !this.patchwise;
    context.drawImage(heat, 0, 0, width, height);
    if (!this.patchwise || this.current.pooling || this.token !== null) return;
    const [rows, columns] = this.info.grid, { row, column } = this.patch();
    const left = column / columns * width, top = row / rows * height, line = Math.max(2 * devicePixelRatio, 2);
    for (const [color, size] of [["#000b", 2 * line], [shared.kept ? "#4cc38a" : "#fff", line]]) {
      context.lineWidth = size;
      context.strokeStyle = color;
      context.strokeRect(left, top, width / columns, height / rows);
    }
  }

  describe() {
    const columns = this.info.grid[1], peak = this.map.values.reduce((best, value, index, all) => (value > all[best] ? index : best), 0);
    const place = (index) => `row ${Math.floor(index / columns) + 1}, column ${index % columns + 1}`;
    let text;
    if (this.patchwise) {
      const name = this.token === null ? "class token" : this.tokens[this.token];
      const from = this.current.pooling ? `the ${name.replace("token", "query")}` : this.token !== null ? `the ${name}` : `the patch in ${place(this.patch().index)}`;
      const heads = this.current.mean ? ", mean of the heads" : this.current.heads === 1 ? "" : this.head ? `, head ${this.head}` : `, mean of ${this.current.heads} heads`;
      const rest = this.current.prefix ? ` ${percent(this.map.prefix)} goes to ${this.current.prefix === 1 ? "the class token" : this.tokens.length ? "the class and distillation tokens" : "the queries"}.` : "";
      text = `Block ${this.current.title}${heads}: ${from} attends most to ${place(peak)} (${percent(this.map.peak)}).${rest}`;
    } else {
      const method = this.methods.get(this.method);
      const name = this.predictions.find(([index]) => index === this.explained)?.[1];
      text = `${method.title}${method.per_class && name ? ` for ${name}` : ""}: ${method.description}. Highest at ${place(peak)}.`;
    }
    find(".caption", this.root).textContent = text;
    this.canvas.setAttribute("aria-label", `${shared.name || "Image"}, ${this.info.title}. ${text} Arrow keys move the patch.`);
    if (this.spoken) find("#spoken").textContent = text;
    this.spoken = false;
  }
}

const updateAll = (spoken = false) => panels.forEach((panel, index) => panel.update(spoken && index === 0));

function movePatch(x, y, spoken = false) {
  [shared.x, shared.y] = [clamp(x, 0, 0.9999), clamp(y, 0, 0.9999)];
  if (panels.some((panel) => panel.patchwise && !panel.current.pooling)) shared.token = null;
  updateAll(spoken);
}
