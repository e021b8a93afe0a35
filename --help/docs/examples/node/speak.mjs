// Speaks with an exported WaveRNN: its conditioning once for the spectrogram, its step once for each sample. The spectrogram and
// the random numbers are the export's own, so what it speaks can be compared with what the model spoke by them.
//
//   node speak.mjs FOLDER      with conditioning/ and step/ in it; exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run
import { InferenceSession, Tensor } from 'onnxruntime-node';
import { difference, readVectors } from './vectors.mjs';

const open = (folder) => InferenceSession.create(`${folder}/model.onnx`, { executionProviders: ['cpu'], intraOpNumThreads: 1, interOpNumThreads: 1, logSeverityLevel: 3 });

// What an array [times, ...rest] holds for one time.
function at(time, { dims: [, ...rest], data }) {
  const size = rest.reduce((one, other) => one * other, 1);
  return new Tensor('float32', data.slice(time * size, (time + 1) * size), rest);
}

async function speak(folder) {
  const given = readVectors(`${folder}/conditioning/vectors.safetensors`);
  const { tensors, tolerance } = readVectors(`${folder}/step/vectors.safetensors`);
  const [conditioning, step] = [await open(`${folder}/conditioning`), await open(`${folder}/step`)];
  const mel = given.tensors['input/mel'], uniform = tensors['check/uniform'], expected = tensors['check/spoken'];

  const known = await conditioning.run({ mel: new Tensor('float32', mel.data, mel.dims) });
  const [times, batch] = known.entry.dims;
  const zeros = (...dims) => new Tensor('float32', new Float32Array(dims.reduce((one, other) => one * other)), dims);
  let sample = zeros(batch), state1 = zeros(batch, tensors['input/state1'].dims[1]), state2 = zeros(batch, tensors['input/state2'].dims[1]);
  const spoken = new Float32Array(batch * times); // [batch, times], as the model reads samples
  for (let time = 0; time < times; time++) {
    const now = Object.fromEntries(Object.entries(known).map(([name, tensor]) => [name, at(time, tensor)]));
    const after = await step.run({ sample, state1, state2, ...now, uniform: at(time, uniform) });
    [sample, state1, state2] = [after.next, after.after1, after.after2];
    for (let row = 0; row < batch; row++) spoken[row * times + time] = sample.data[row];
  }

  const apart = difference(expected.data, spoken);
  console.log(`spoke ${batch} x ${times} samples`);
  console.log(apart === null ? 'spoken the same bits' : `spoken differs by ${apart.relative.toExponential(1)} of its largest number`);
  return apart === null || apart.relative <= tolerance ? 0 : 1;
}

try {
  if (process.argv.length !== 3) throw new Error('usage: node speak.mjs FOLDER');
  process.exitCode = await speak(process.argv[2]);
} catch (error) {
  console.error(error.message);
  process.exitCode = 2;
}
