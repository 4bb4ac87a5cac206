// Runs a model in the browser: preprocessing.onnx takes the pixels of an image of any size, network.onnx what it computes.

const TOP = 5;
const REDUCE = 8; // images whose shorter side is more than so many times that of the network are reduced first, to save memory
const element = (id) => document.getElementById(id);
const settings = await (await fetch("./model.json")).json();

async function open(file, provider) {
  const ort = await import(settings.runtimes[provider]);
  ort.env.wasm.numThreads = 1; // more need headers that a plain static server does not send
  ort.env.wasm.wasmPaths = new URL("./runtime/", location.href).href;
  ort.env.logLevel = "error";
  const session = await ort.InferenceSession.create(file, { executionProviders: [provider], logSeverityLevel: 3 });
  return { ort, session, provider };
}

async function openNetwork() {
  if (settings.runtimes.webgpu && (await navigator.gpu?.requestAdapter().catch(() => null))) {
    try {
      const network = await open("./network.onnx", "webgpu");
      const [height, width] = settings.image_size;
      await compute(network, { data: new Float32Array(3 * height * width), dims: [1, 3, height, width] }); // compiles
      return network;
    } catch (error) {
      console.warn("WebGPU is not used:", error);
    }
  }
  return open("./network.onnx", "wasm");
}

function compute({ ort, session }, { data, dims }) {
  return session.run({ normalized: new ort.Tensor("float32", data, dims) });
}

class UnreadableImage extends Error {}

// RGB values of an image, in its stored colors, upright, over white: as the package decodes it.
async function readPixels(blob) {
  const options = { colorSpaceConversion: "none", imageOrientation: "from-image" };
  const bitmap = await createImageBitmap(blob, options).catch((error) => { throw new UnreadableImage(error.message); });
  let { width, height } = bitmap;
  const limit = REDUCE * Math.max(...settings.image_size);
  while (Math.min(width, height) > limit) [width, height] = [Math.ceil(width / 2), Math.ceil(height / 2)];
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const rgba = context.getImageData(0, 0, width, height).data;
  const pixels = new Uint8Array(width * height * 3);
  for (let from = 0, to = 0; from < rgba.length; from += 4) {
    pixels[to++] = rgba[from];
    pixels[to++] = rgba[from + 1];
    pixels[to++] = rgba[from + 2];
  }
  return { pixels, width, height };
}

let running = Promise.resolve(); // the sessions compute one image at a time

// The classes of an image, the most probable first: [{index, name, probability}].
export async function predict(blob) {
  const { preprocessing, network } = await model;
  const { pixels, width, height } = await readPixels(blob);
  const images = new preprocessing.ort.Tensor("uint8", pixels, [1, height, width, 3]);
  const run = async () => compute(network, (await preprocessing.session.run({ images })).normalized);
  running = running.catch(() => {}).then(run);
  const outputs = await running;
  const logits = Array.from(outputs.logits.data, Number);
  const largest = Math.max(...logits);
  const parts = logits.map((logit) => Math.exp(logit - largest));
  const total = parts.reduce((sum, part) => sum + part, 0);
  return parts
    .map((part, index) => ({ index, name: settings.class_names?.[index] ?? `class ${index}`, probability: part / total }))
    .sort((one, other) => other.probability - one.probability);
}

function show(classes) {
  element("predictions").replaceChildren(
    ...classes.slice(0, TOP).map(({ name, probability }) => {
      const text = `${(100 * probability).toFixed(1)} %`;
      const item = document.createElement("li");
      const meter = Object.assign(document.createElement("meter"), { value: probability, min: 0, max: 1 });
      meter.setAttribute("aria-label", `${name}: ${text}`);
      for (const content of [name, text]) item.append(Object.assign(document.createElement("span"), { textContent: content }));
      item.append(meter);
      return item;
    }),
  );
}

let latest; // the image that was chosen last: results of others are not shown

async function choose(blob) {
  if (!blob) return;
  latest = blob;
  const status = element("status");
  status.textContent = "Computing …";
  element("predictions").replaceChildren();
  const preview = element("preview");
  URL.revokeObjectURL(preview.src);
  preview.src = URL.createObjectURL(blob);
  preview.hidden = false;
  try {
    await model;
    const start = performance.now();
    const classes = await predict(blob);
    if (blob !== latest) return;
    show(classes);
    status.textContent = `Computed in ${Math.round(performance.now() - start)} ms (${(await model).network.provider}).`;
  } catch (error) {
    if (blob !== latest) return;
    preview.hidden = true;
    status.textContent = error instanceof UnreadableImage
      ? `This file could not be read as an image (${error.message}): choose another one.`
      : `The prediction failed: ${error.message}`;
  }
}

const drop = element("drop");
element("file").addEventListener("change", (event) => choose(event.target.files[0]));
addEventListener("paste", (event) => choose(event.clipboardData.files[0]));
addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
addEventListener("dragleave", () => drop.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  choose(event.dataTransfer.files[0]);
});

// The preprocessing computes in float64, which WebGPU does not have.
const model = open("./preprocessing.onnx", "wasm").then(async (preprocessing) => ({ preprocessing, network: await openNetwork() }));
model.then(
  ({ network }) => (element("status").textContent = `Ready (${network.provider}).`),
  (error) => (element("status").textContent = `The model could not be loaded: ${error.message}`),
);
