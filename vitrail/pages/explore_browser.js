
// ---- Which image is shown.

const collection = page.collection;
const uploads = [];

async function openImage(image, name, label = null, row = null) {
  Object.assign(shared, { image, name, label, row });
  showMessage("");
  find("#panels").hidden = false;
  find("#opener").classList.remove("large");
  const wrong = row === null ? null : collection.scans[0].wrong?.[row];
  const badge = label === null ? [] : [make("span", { className: `badge ${wrong === null || wrong === undefined ? "plain" : wrong ? "wrong" : "right"}` }, `label: ${label}`)];
  find("#current").replaceChildren(name, ...badge);
  for (const tile of document.querySelectorAll(".tile")) tile.setAttribute("aria-current", tile.dataset.key === image);
  drawMap();
  try {
    await Promise.all(panels.map((panel) => panel.open()));
  } catch (error) {
    showMessage(error.message);
  }
}

function openRow(row, scroll = false) {
  if (scroll) find("#current").scrollIntoView({ block: "start", behavior: matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth" });
  return openImage(`c${row}`, collection.names[row], collection.labels?.[row] ?? null, row);
}

function makeTile(key, url, name, open, ...caption) {
  const tile = make("button", { type: "button", className: "tile" }, make("img", { alt: "", src: url, loading: "lazy" }), ...caption);
  tile.setAttribute("aria-label", name);
  tile.setAttribute("aria-current", key === shared.image);
  tile.dataset.key = key;
  tile.title = name;
  tile.addEventListener("click", open);
  return tile;
}

// ---- Uploads.

async function upload(files) {
  const images = [...files].filter((each) => each instanceof File);
  if (!images.length) return;
  try {
    const added = await source.upload(images);
    uploads.unshift(...added);
    uploads.splice(16);
    const strip = find("#strip");
    strip.hidden = uploads.length < 2;
    strip.replaceChildren(...uploads.map(({ key, name }) =>
      makeTile(key, `/api/view?${new URLSearchParams({ model: 0, image: key })}`, name, () => openImage(key, name), name)));
    await openImage(added[0].key, added[0].name);
  } catch (error) {
    showMessage(error.message);
  }
}

function listenForUploads() {
  const input = find("#file");
  find("#opener").hidden = false;
  find("#choose").addEventListener("click", () => input.click());
  input.addEventListener("change", async () => {
    await upload(input.files);
    input.value = "";
  });
  const dragging = (on) => document.body.classList.toggle("dragging", on);
  addEventListener("dragover", (event) => { event.preventDefault(); dragging(true); });
  addEventListener("dragleave", (event) => { if (!event.relatedTarget) dragging(false); });
  addEventListener("drop", (event) => { event.preventDefault(); dragging(false); upload(event.dataTransfer.files); });
  addEventListener("paste", (event) => upload(event.clipboardData.files));
}

// ---- The images of the folder: filters, grid and map.

const STEP = 60, THUMBNAILS = 300;
const browser = { view: "grid", limit: STEP, rows: [], focus: null, thumbnails: new Map(), places: [] };

function fill(select, options) {
  select.replaceChildren(...options.map(([value, text]) => new Option(text, value)));
  select.addEventListener("change", () => { browser.limit = STEP; filterRows(); });
}

function startBrowser() {
  const { scans, names } = collection, first = scans[0], all = names.map((_, row) => row);
  find("#browser").hidden = false;
  find("#collection").textContent = collection.title;
  const counts = new Map();
  for (const name of first.predictions) if (name !== null) counts.set(name, (counts.get(name) || 0) + 1);
  fill(find("#class"), [["", "all classes"], ...[...counts].sort().map(([name, count]) => [name, `${name} (${count})`])]);
  find("#class").parentElement.hidden = !counts.size;
  browser.hues = new Map([...counts.keys()].sort().map((name, index) => [name, 25 + index * 137.5 % 310]));
  browser.only = { "": () => true };
  const choices = [["", `all (${names.length})`]];
  const add = (key, text, test) => {
    browser.only[key] = test;
    choices.push([key, `${text} (${all.filter(test).length})`]);
  };
  scans.forEach((scan, model) => {
    if (!scan.wrong) return;
    add(`wrong${model}`, scans.length > 1 ? `wrong: ${page.models[model].title}` : "wrong", (row) => scan.wrong[row]);
  });
  if (scans.length > 1 && counts.size) add("differ", "predictions differ", (row) => scans[0].predictions[row] !== scans[1].predictions[row]);
  fill(find("#only"), choices);
  find("#only-label").hidden = choices.length === 1;
  fill(find("#order"), [["folder", "as in the folder"], ["class", "by prediction"], ["high", "most confident"], ["low", "least confident"]]);
  fill(find("#points"), page.models.map(({ title }, model) => [model, title]));
  for (const button of find("[aria-label=View]").children) {
    button.addEventListener("click", () => { browser.view = button.dataset.view; filterRows(); });
  }
  find("#more").addEventListener("click", () => { browser.limit += 2 * STEP; showGrid(); });
  find("#grid").addEventListener("keydown", moveInGrid);
  listenToMap();
  filterRows();
}

function filterRows() {
  const { predictions, probabilities } = collection.scans[0], only = browser.only[find("#only").value], name = find("#class").value;
  const orders = {
    folder: (a, b) => a - b,
    class: (a, b) => (predictions[a] ?? "").localeCompare(predictions[b] ?? "") || probabilities[b] - probabilities[a],
    high: (a, b) => probabilities[b] - probabilities[a],
    low: (a, b) => probabilities[a] - probabilities[b],
  };
  browser.rows = collection.names.map((_, row) => row).filter((row) => only(row) && (!name || predictions[row] === name));
  browser.rows.sort(orders[find("#order").value]);
  const shown = browser.rows.length === collection.names.length ? plural(browser.rows.length, "image") : `${browser.rows.length} of ${plural(collection.names.length, "image")}`;
  find("#count").textContent = [shown, ...collection.notes].join("; ");
  const map = browser.view === "map";
  for (const button of find("[aria-label=View]").children) button.setAttribute("aria-pressed", button.dataset.view === browser.view);
  find("#grid").hidden = map;
  find("#map").hidden = !map;
  find("#order").parentElement.hidden = map;
  find("#points-label").hidden = !map || page.models.length < 2;
  if (map) drawMap();
  showGrid();
}

function showGrid() {
  find("#more").hidden = browser.view === "map" || browser.rows.length <= browser.limit;
  find("#grid").replaceChildren(...browser.rows.slice(0, browser.limit).map((row) => {
    const caption = collection.scans.map(({ predictions, probabilities }) => predictions[row] === null
      ? make("div", {}, collection.names[row])
      : make("div", {}, make("b", {}, predictions[row].replaceAll("_", "_\u200b")), ` ${percent(probabilities[row])}`));
    if (collection.scans.some(({ wrong }) => wrong?.[row])) caption.push(make("div", { className: "label" }, `label: ${collection.labels[row]}`));
    return makeTile(`c${row}`, source.thumbnail(row), collection.names[row], () => openRow(row, true), ...caption);
  }));
}

function moveInGrid(event) {
  const tiles = [...find("#grid").children], index = tiles.indexOf(event.target.closest(".tile"));
  const columns = tiles.filter((tile) => tile.offsetTop === tiles[0].offsetTop).length;
  const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
  if (!step || index < 0 || !tiles[index + step]) return;
  event.preventDefault();
  tiles[index + step].focus();
}

function drawMap() {
  const canvas = find("#map canvas");
  if (!collection || find("#map").hidden) return;
  const box = canvas.getBoundingClientRect(), ratio = devicePixelRatio;
  canvas.width = box.width * ratio;
  canvas.height = box.height * ratio;
  const context = canvas.getContext("2d"), model = Number(find("#points").value), scan = collection.scans[model];
  const shown = new Set(browser.rows), small = shown.size <= THUMBNAILS, side = (box.width < 600 ? 24 : 34), edge = side;
  const style = getComputedStyle(document.documentElement);
  context.scale(ratio, ratio);
  browser.places = scan.points.map(([x, y]) => [edge + x * (box.width - 2 * edge), box.height - edge - y * (box.height - 2 * edge)]);
  const order = browser.places.map((_, row) => row).sort((a, b) => shown.has(a) - shown.has(b) || (a === browser.focus) - (b === browser.focus));
  for (const row of order) {
    const [x, y] = browser.places[row], own = browser.hues.get(collection.scans[0].predictions[row]) ?? 210;
    const color = `hsl(${own} 70% 50%)`, current = row === shared.row || row === browser.focus;
    if (!shown.has(row) || !small) {
      context.globalAlpha = shown.has(row) ? 0.85 : 0.15;
      context.fillStyle = color;
      context.beginPath();
      context.arc(x, y, current ? 7 : 4, 0, 7);
      context.fill();
      context.globalAlpha = 1;
      if (!current) continue;
    }
    const size = current ? side * 1.5 : side, left = x - size / 2, top = y - size / 2;
    const photo = thumbnailOf(row);
    context.save();
    context.beginPath();
    context.roundRect(left, top, size, size, 5);
    context.fillStyle = style.getPropertyValue("--soft");
    context.fill();
    context.clip();
    if (photo.complete && photo.naturalWidth) {
      const crop = Math.min(photo.naturalWidth, photo.naturalHeight);
      context.drawImage(photo, (photo.naturalWidth - crop) / 2, (photo.naturalHeight - crop) / 2, crop, crop, left, top, size, size);
    }
    context.restore();
    context.lineWidth = current ? 4 : 2.5;
    context.strokeStyle = current ? style.getPropertyValue("--blue") : scan.wrong?.[row] ? style.getPropertyValue("--red") : color;
    context.beginPath();
    context.roundRect(left, top, size, size, 5);
    context.stroke();
  }
  const wrong = scan.wrong ? " A red frame is a wrong prediction." : "";
  find("#map figcaption").textContent = `The first two principal components of the features, ${percent(scan.explained)} of their variance. Colors are predicted classes.${wrong}`;
}

function thumbnailOf(row) {
  if (!browser.thumbnails.has(row)) {
    const photo = make("img", { src: source.thumbnail(row) });
    photo.addEventListener("load", () => {
      cancelAnimationFrame(browser.frame);
      browser.frame = requestAnimationFrame(drawMap);
    });
    browser.thumbnails.set(row, photo);
  }
  return browser.thumbnails.get(row);
}

// The nearest image to a place; with a direction, only of those in this direction.
function nearest(x, y, right = 0, down = 0, except = null) {
  let best = null, least = Infinity;
  for (const row of browser.rows) {
    const across = browser.places[row][0] - x, along = browser.places[row][1] - y;
    const ahead = across * right + along * down;
    if (row === except || ((right || down) && ahead <= Math.abs(across * down) + Math.abs(along * right) * 0.5)) continue;
    const distance = Math.hypot(across, along);
    if (distance < least) [best, least] = [row, distance];
  }
  return right || down || least < 40 ? best : null;
}

function focusPoint(row) {
  const tip = find("#tip");
  browser.focus = row;
  tip.hidden = row === null;
  if (row !== null) {
    const [x, y] = browser.places[row], { predictions, probabilities } = collection.scans[0], box = find("#map canvas").getBoundingClientRect();
    find("img", tip).src = source.thumbnail(row);
    const label = collection.labels?.[row] ? `, label ${collection.labels[row]}` : "";
    const text = predictions[row] === null ? collection.names[row] : `${predictions[row]} ${percent(probabilities[row])}${label}`;
    find("span", tip).textContent = text;
    tip.style.left = `${clamp(x + 24, 0, box.width - 140)}px`;
    tip.style.top = `${clamp(y + 24, 0, Math.max(box.height - 170, 0))}px`;
    find("#spoken").textContent = document.activeElement === find("#map canvas") ? `${collection.names[row]}: ${text}` : "";
  }
  drawMap();
}

function listenToMap() {
  const canvas = find("#map canvas");
  const rowAt = (event) => {
    const box = canvas.getBoundingClientRect();
    return nearest(event.clientX - box.left, event.clientY - box.top);
  };
  canvas.addEventListener("pointermove", (event) => { const row = rowAt(event); if (row !== browser.focus) focusPoint(row); });
  canvas.addEventListener("pointerleave", () => focusPoint(null));
  canvas.addEventListener("click", (event) => { const row = rowAt(event); if (row !== null) openRow(row, true); });
  canvas.addEventListener("blur", () => focusPoint(null));
  canvas.addEventListener("keydown", (event) => {
    const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    const from = browser.focus ?? browser.rows[0];
    if (from === undefined) return;
    if (direction) focusPoint(browser.focus === null ? from : nearest(...browser.places[from], ...direction, from) ?? from);
    else if (event.key === "Enter") openRow(from, true);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(drawMap).observe(canvas);
}

addEventListener("keydown", (event) => {
  const step = { n: 1, p: -1 }[event.key];
  if (!step || !collection || event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select")) return;
  const index = browser.rows.indexOf(shared.row), row = browser.rows[index < 0 ? 0 : index + step];
  if (row !== undefined) openRow(row);
});

// ---- Start.

page.models.forEach((info, number) => panels.push(new Panel(number, info)));
find("#panels").classList.toggle("two", panels.length > 1);
find("#link-label").hidden = panels.length < 2;
if (!page.stored) listenForUploads();
if (collection) {
  startBrowser();
  openRow(browser.rows[0]);
} else {
  find("#panels").hidden = true;
  find("#opener").classList.add("large");
}
