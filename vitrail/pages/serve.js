"use strict";
// The page of `vitrail serve`: sends images to /predict or /explain and shows what comes back.
const find = (id) => document.getElementById(id);
const MAX_SHOWN = 30;

async function post(path, model, file) {
  const headers = { "Content-Type": file.type.startsWith("image/") ? file.type : "application/octet-stream" };
  if (find("key").value) headers["X-API-Key"] = find("key").value;
  const query = new URLSearchParams({ model });
  const response = await fetch(`${path}?${query}`, { method: "POST", headers, body: file });
  const content = await response.json();
  if (!response.ok) throw new Error(content.error);
  return content;
}

function make(tag, className, text = "") {
  const element = document.createElement(tag);
  element.className = className;
  element.textContent = text;
  return element;
}

function drawMap(canvas, map) {
  canvas.width = map[0].length;
  canvas.height = map.length;
  const largest = Math.max(...map.flat(), 1e-12);
  const context = canvas.getContext("2d");
  map.forEach((row, y) => row.forEach((value, x) => {
    const share = value / largest;
    context.fillStyle = `hsl(${30 + 30 * share} 95% ${Math.round(70 * share)}% / ${0.25 + 0.75 * share})`;
    context.fillRect(x, y, 1, 1);
  }));
}

// Put the map over the part of the image that the model sees: the center crop, from its upper left as far as the patches cover it.
function placeMap(canvas, { naturalWidth, naturalHeight }, { image_size: [height, width], crop_ratio, resize }, covered) {
  const scale = Math.max(height / naturalHeight, width / naturalWidth) / crop_ratio;
  const [across, down] = resize === "square" ? [1, 1] : [width / scale / naturalWidth, height / scale / naturalHeight];
  for (const [start, side, crop, share] of [["left", "width", across, covered[1] / width], ["top", "height", down, covered[0] / height]]) {
    canvas.style[side] = `${100 * crop * share}%`;
    canvas.style[start] = `${50 - 50 * crop}%`;
  }
}

async function show(file) {
  const { value: model, dataset } = find("model").selectedOptions[0];
  const result = make("div", "result");
  const view = make("div", "view");
  const list = make("div", "");
  const image = make("img", "");
  image.alt = file.name || "image";
  image.src = URL.createObjectURL(file);
  image.onload = image.onerror = () => URL.revokeObjectURL(image.src);
  view.append(image);
  result.append(view, list);
  const waiting = make("p", "note", "…");
  list.append(waiting);
  find("results").prepend(result);
  while (find("results").children.length > MAX_SHOWN) find("results").lastChild.remove();
  try {
    const { predictions: [prediction] } = await post("/predict", model, file);
    list.replaceChildren(...prediction.classes.map(({ name, probability }) => {
      const row = make("div", "class", name);
      row.prepend(make("span", "", `${(100 * probability).toFixed(1)}%`));
      const bar = make("div", "bar");
      bar.style.width = `${100 * probability}%`;
      row.append(bar);
      return row;
    }));
    if (find("explain").checked) {
      const { method, explanations: [explanation] } = await post("/explain", model, file);
      await image.decode().catch(() => { throw new Error("This browser cannot show the image, so its map is not drawn."); });
      const canvas = make("canvas", "");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${method} of ${explanation.class.name}`);
      drawMap(canvas, explanation.map);
      placeMap(canvas, image, JSON.parse(dataset.preprocessing), JSON.parse(dataset.covered));
      view.append(canvas);
      list.append(make("p", "note", `Parts that matter for ${explanation.class.name}, by ${method}.`));
    }
    find("message").textContent = "";
  } catch (error) {
    waiting.remove();
    find("message").textContent = error.message;
  }
}

async function showAll(files) {
  for (const file of files) await show(file);
}

const drop = find("drop");
for (const name of ["dragover", "drop", "dragleave"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    drop.classList.toggle("over", name === "dragover");
  });
}
document.addEventListener("drop", (event) => showAll(event.dataTransfer.files));
document.addEventListener("paste", (event) => showAll(event.clipboardData.files));
find("files").addEventListener("change", (event) => {
  const files = [...event.target.files];
  event.target.value = ""; // so that the same file can be chosen again
  showAll(files);
});
