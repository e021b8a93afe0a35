// Reads the test vectors of an export, a .safetensors file: eight bytes with the length of a header, the header, which is
// JSON, and the numbers.
import { readFileSync } from 'node:fs';

// What the format and onnxruntime call each kind of number, and what holds it in JavaScript.
const KINDS = {
  F64: ['float64', Float64Array], F32: ['float32', Float32Array], I64: ['int64', BigInt64Array], I32: ['int32', Int32Array],
  I16: ['int16', Int16Array], I8: ['int8', Int8Array], U8: ['uint8', Uint8Array], BOOL: ['bool', Uint8Array],
};

export function readVectors(path) {
  const bytes = readFileSync(path);
  const start = bytes.length < 8 ? Infinity : 8 + Number(bytes.readBigUInt64LE(0));
  if (start > bytes.length) throw new Error(`${path} is cut short`);
  const { __metadata__: about, ...header } = JSON.parse(bytes.toString('utf8', 8, start));
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [first, last] }] of Object.entries(header)) {
    if (!(dtype in KINDS)) throw new Error(`${name} is of ${dtype}, which this program does not read`);
    const [type, Numbers] = KINDS[dtype];
    if (start + last > bytes.length) throw new Error(`${path} is cut short`);
    const own = bytes.buffer.slice(bytes.byteOffset + start + first, bytes.byteOffset + start + last); // from its own beginning: numbers must be aligned
    tensors[name] = { type, dims: shape, data: new Numbers(own) };
  }
  const names = (key) => about[key].split('\n').filter(Boolean);
  return { tensors, inputs: names('inputs'), outputs: names('outputs'), classes: names('classes'), tolerance: Number(about.tolerance) };
}

// How far found numbers are from expected ones; null: the same bits.
export function difference(expected, found) {
  const bits = (data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  if (Buffer.compare(bits(expected), bits(found)) === 0) return null;
  let error = 0, largest = 0, ulps = 0;
  const [one, other] = [counted(expected), counted(found)];
  for (let place = 0; place < expected.length; place++) {
    const [a, b] = [Number(expected[place]), Number(found[place])];
    if (Number.isFinite(a) !== Number.isFinite(b)) error = Infinity;
    else if (Number.isFinite(a)) error = Math.max(error, Math.abs(a - b));
    if (Number.isFinite(a)) largest = Math.max(largest, Math.abs(a));
    ulps = Math.max(ulps, Math.abs(one(place) - other(place)));
  }
  return { relative: error / (largest || 1), ulps };
}

// The bits of a floating-point number, with those of negative ones mirrored, count up as the numbers do.
function counted(data) {
  const whole = data instanceof Float32Array ? Int32Array : data instanceof Float64Array ? BigInt64Array : null;
  if (!whole) return () => 0;
  const bits = new whole(data.buffer, data.byteOffset, data.length);
  const least = data instanceof Float32Array ? -(2 ** 31) : -(2 ** 63);
  return (place) => (Number(bits[place]) < 0 ? least - Number(bits[place]) : Number(bits[place]));
}
