// Runs model.onnx of an export on its test vectors, and prints what it predicts and how far that is from what the model
// gave where it was exported. It needs Java 17 and the jar com.microsoft.onnxruntime:onnxruntime beside this file:
//
//   java -cp 'docs/examples/java/*' docs/examples/java/Verify.java FOLDER
//
// exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run

import ai.onnxruntime.OnnxJavaType;
import ai.onnxruntime.OnnxTensor;
import ai.onnxruntime.OnnxValue;
import ai.onnxruntime.OrtEnvironment;
import ai.onnxruntime.OrtSession;
import ai.onnxruntime.TensorInfo;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

public final class Verify {
  record Numbers(OnnxJavaType type, long[] shape, ByteBuffer bytes) {}

  private static final Map<String, OnnxJavaType> KINDS =
      Map.of("F64", OnnxJavaType.DOUBLE, "F32", OnnxJavaType.FLOAT, "I64", OnnxJavaType.INT64, "I32", OnnxJavaType.INT32,
          "U8", OnnxJavaType.UINT8, "I8", OnnxJavaType.INT8, "BOOL", OnnxJavaType.BOOL);

  // A .safetensors file: eight bytes with the length of a header, the header, which is JSON, and the numbers. samewise
  // writes the header without spaces, so that a regular expression reads it.
  private final String header;
  private final ByteBuffer numbers;

  private Verify(Path file) throws IOException {
    ByteBuffer held = ByteBuffer.wrap(Files.readAllBytes(file)).order(ByteOrder.LITTLE_ENDIAN);
    if (held.capacity() < 8 || held.getLong(0) > held.capacity() - 8) throw new IOException(file + " is cut short");
    int length = (int) held.getLong(0);
    header = new String(held.array(), 8, length, StandardCharsets.UTF_8);
    numbers = held.slice(8 + length, held.capacity() - 8 - length);
  }

  private String about(String key) throws IOException {
    Matcher found = Pattern.compile("\"" + key + "\":\"((?:[^\"\\\\]|\\\\.)*)\"").matcher(header);
    if (!found.find()) throw new IOException("no " + key);
    return found.group(1);
  }

  private List<String> names(String key) throws IOException { // one a line: in JSON, \n is a backslash and an n
    return about(key).isEmpty() ? List.of() : Arrays.asList(about(key).split("\\\\n"));
  }

  private Numbers tensor(String name) throws IOException {
    String form = "\"" + Pattern.quote(name) + "\":\\{\"dtype\":\"(\\w+)\",\"shape\":\\[([\\d,]*)\\],\"data_offsets\":\\[(\\d+),(\\d+)\\]\\}";
    Matcher found = Pattern.compile(form).matcher(header);
    if (!found.find()) throw new IOException("there is no tensor " + name);
    if (!KINDS.containsKey(found.group(1))) throw new IOException(name + " is of " + found.group(1) + ", which this program does not read");
    long[] shape = found.group(2).isEmpty() ? new long[0] : Arrays.stream(found.group(2).split(",")).mapToLong(Long::parseLong).toArray();
    int first = Integer.parseInt(found.group(3)), last = Integer.parseInt(found.group(4));
    if (last > numbers.capacity()) throw new IOException(name + " is cut short");
    ByteBuffer own = ByteBuffer.allocateDirect(last - first).order(ByteOrder.nativeOrder());
    own.put(numbers.slice(first, last - first)).rewind();
    return new Numbers(KINDS.get(found.group(1)), shape, own);
  }

  private static double number(OnnxJavaType type, ByteBuffer bytes, int place) {
    return switch (type) {
      case DOUBLE -> bytes.getDouble(8 * place);
      case FLOAT -> bytes.getFloat(4 * place);
      case INT64 -> bytes.getLong(8 * place);
      case INT32 -> bytes.getInt(4 * place);
      default -> bytes.get(place);
    };
  }

  // The bits of a floating-point number, with those of negative ones mirrored, count up as the numbers do.
  private static double counted(OnnxJavaType type, ByteBuffer bytes, int place) {
    if (type == OnnxJavaType.FLOAT) {
      int bits = bytes.getInt(4 * place);
      return bits < 0 ? (double) Integer.MIN_VALUE - bits : bits;
    }
    if (type != OnnxJavaType.DOUBLE) return 0;
    long bits = bytes.getLong(8 * place);
    return bits < 0 ? (double) Long.MIN_VALUE - bits : bits;
  }

  private int run(String folder) throws Exception {
    OrtEnvironment environment = OrtEnvironment.getEnvironment();
    boolean sound = true;
    try (OrtSession.SessionOptions options = new OrtSession.SessionOptions()) {
      options.setIntraOpNumThreads(1);
      options.setInterOpNumThreads(1);
      try (OrtSession session = environment.createSession(folder + "/model.onnx", options)) {
        Map<String, OnnxTensor> feeds = new HashMap<>();
        for (String name : names("inputs")) {
          Numbers given = tensor("input/" + name);
          String called = name.replace('.', '_'); // ONNX has no dots in names
          if (session.getInputNames().contains(called)) feeds.put(called, OnnxTensor.createTensor(environment, given.bytes(), given.shape(), given.type()));
        }
        List<String> classes = names("classes");
        try (OrtSession.Result results = session.run(feeds)) {
          for (String name : names("outputs")) {
            OnnxValue value = results.get(name.replace('.', '_')).orElseThrow(() -> new IOException("the model gives no " + name));
            sound &= compare(name, tensor("output/" + name), (OnnxTensor) value, classes);
          }
        } finally {
          feeds.values().forEach(OnnxTensor::close);
        }
      }
    }
    return sound ? 0 : 1;
  }

  private boolean compare(String name, Numbers expected, OnnxTensor value, List<String> classes) throws Exception {
    TensorInfo info = value.getInfo();
    if (info.type != expected.type() || !Arrays.equals(info.getShape(), expected.shape())) throw new IOException(name + " has another shape or dtype");
    ByteBuffer found = value.getByteBuffer().order(ByteOrder.nativeOrder());
    long[] shape = expected.shape();
    int count = (int) Arrays.stream(shape).reduce(1, (one, other) -> one * other);
    if (shape.length == 2 && shape[1] == classes.size()) {
      for (int row = 0; row < shape[0]; row++) {
        int best = 0;
        for (int column = 1; column < classes.size(); column++) {
          int start = row * classes.size();
          if (number(info.type, found, start + column) > number(info.type, found, start + best)) best = column;
        }
        System.out.printf("sample %d: %s%n", row, classes.get(best));
      }
    }
    if (expected.bytes().equals(found)) {
      System.out.println(name + " the same bits");
      return true;
    }
    double error = 0, largest = 0, ulps = 0;
    for (int place = 0; place < count; place++) {
      double a = number(info.type, expected.bytes(), place), b = number(info.type, found, place);
      if (Double.isFinite(a) != Double.isFinite(b)) error = Double.POSITIVE_INFINITY;
      else if (Double.isFinite(a)) error = Math.max(error, Math.abs(a - b));
      if (Double.isFinite(a)) largest = Math.max(largest, Math.abs(a));
      ulps = Math.max(ulps, Math.abs(counted(info.type, expected.bytes(), place) - counted(info.type, found, place)));
    }
    double relative = error / (largest > 0 ? largest : 1);
    System.out.printf(Locale.ROOT, "%s differs by %.1e of its largest number (%,.0f ulps)%n", name, relative, ulps);
    return relative <= Double.parseDouble(about("tolerance"));
  }

  public static void main(String[] arguments) {
    try {
      if (arguments.length != 1) throw new IOException("usage: java -cp JAR Verify.java FOLDER");
      System.exit(new Verify(Path.of(arguments[0], "vectors.safetensors")).run(arguments[0]));
    } catch (Exception error) {
      System.err.println(error.getMessage());
      System.exit(2);
    }
  }
}
