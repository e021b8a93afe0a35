// Runs model.onnx of an export on its test vectors, and prints what it predicts and how far that is from what the model
// gave where it was exported.
//
//   node verify.mjs FOLDER      exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run
import { InferenceSession, Tensor } from 'onnxruntime-node';
import { difference, readVectors } from './vectors.mjs';

async function verify(folder) {
  const { tensors, inputs, outputs, classes, tolerance } = readVectors(`${folder}/vectors.safetensors`);
  const session = await InferenceSession.create(`${folder}/model.onnx`, { executionProviders: ['cpu'], intraOpNumThreads: 1, interOpNumThreads: 1 });
  const called = (name) => name.replaceAll('.', '_'); // ONNX has no dots in names
  const feeds = {};
  for (const name of inputs) {
    const { type, dims, data } = tensors[`input/${name}`];
    if (session.inputNames.includes(called(name))) feeds[called(name)] = new Tensor(type, data, dims);
  }
  const results = await session.run(feeds);

  let sound = true;
  for (const name of outputs) {
    const expected = tensors[`output/${name}`];
    const found = results[called(name)];
    if (found === undefined) throw new Error(`the model gives no ${name}`);
    if (found.type !== expected.type || String(found.dims) !== String(expected.dims)) throw new Error(`${name} has another shape or dtype`);
    const [rows, width] = found.dims;
    for (let row = 0; found.dims.length === 2 && width === classes.length && row < rows; row++) {
      const scores = found.data.subarray(row * width, (row + 1) * width);
      console.log(`sample ${row}: ${classes[scores.indexOf(Math.max(...scores))]}`);
    }
    const apart = difference(expected.data, found.data);
    sound &&= apart === null || apart.relative <= tolerance;
    console.log(apart === null ? `${name} the same bits` : `${name} differs by ${short(apart.relative)} of its largest number (${apart.ulps.toLocaleString('en')} ulps)`);
  }
  return sound ? 0 : 1;
}

function short(number) { // two digits, as C and Python print them
  const [, exponent] = number.toExponential(1).split('e');
  const text = Number(exponent) < -4 ? number.toExponential(1).replace(/\.0e/, 'e') : String(Number(number.toPrecision(2)));
  return text.replace(/e([+-])(\d)$/, 'e$10$2');
}

try {
  if (process.argv.length !== 3) throw new Error('usage: node verify.mjs FOLDER');
  process.exitCode = await verify(process.argv[2]);
} catch (error) {
  console.error(error.message);
  process.exitCode = 2;
}
