// Runs model.portable.pte of an export on its test vectors by ExecuTorch, and prints what it predicts and how far that is from what
// the model gave where it was exported. It has only the operators of the export that it was built for: see CMakeLists.txt.
//
//   verify FOLDER      exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run
#include <executorch/extension/data_loader/file_data_loader.h>
#include <executorch/runtime/core/exec_aten/exec_aten.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/platform/runtime.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

using executorch::aten::ScalarType;
using executorch::runtime::Error;
using executorch::runtime::EValue;

[[noreturn]] static void fail(const std::string& words) {
  std::fprintf(stderr, "%s\n", words.c_str());
  std::exit(2);
}

// A .safetensors file: eight bytes with the length of a header, the header, which is JSON, and the numbers. samewise
// writes the header without spaces.
struct Vectors {
  struct Numbers {
    ScalarType type;
    std::vector<executorch::aten::SizesType> shape;
    std::vector<uint8_t> bytes;
  };
  std::string held, header;

  explicit Vectors(const std::string& path) {
    FILE* file = std::fopen(path.c_str(), "rb");
    if (!file) fail(path + " cannot be read");
    char part[1 << 16];
    for (size_t count; (count = std::fread(part, 1, sizeof part, file)) > 0;) held.append(part, count);
    std::fclose(file);
    uint64_t length = 0;
    if (held.size() >= 8) std::memcpy(&length, held.data(), 8);
    if (held.size() < 8 || length > held.size() - 8) fail(path + " is cut short");
    header = held.substr(8, length);
    held = held.substr(8 + length);
  }

  std::string between(const std::string& before, const std::string& after) const {
    size_t first = header.find(before);
    if (first == std::string::npos) fail("vectors.safetensors has no " + before);
    return header.substr(first + before.size(), header.find(after, first + before.size()) - first - before.size());
  }

  std::vector<std::string> names(const std::string& key) const {  // one a line: in JSON, \n is a backslash and an n
    std::vector<std::string> all{""};
    std::string text = between("\"" + key + "\":\"", "\"");
    for (size_t at = 0; at < text.size(); ++at) {
      if (text.compare(at, 2, "\\n") == 0) all.emplace_back(), ++at;
      else all.back() += text[at];
    }
    return all;
  }

  Numbers tensor(const std::string& name) const {
    std::string said = between("\"" + name + "\":{\"dtype\":\"", "}");
    std::string type = said.substr(0, said.find('"'));
    Numbers found{type == "F32" ? ScalarType::Float : type == "U8" ? ScalarType::Byte : ScalarType::Long, {}, {}};
    if (type != "F32" && type != "U8" && type != "I64") fail(name + " is of " + type + ", which this program does not read");
    const char* at = said.c_str() + said.find('[') + 1;
    for (char* end; *at != ']'; at = *end == ',' ? end + 1 : end) found.shape.push_back(std::strtol(at, &end, 10));
    char* end;
    size_t first = std::strtoul(std::strchr(at, '[') + 1, &end, 10), last = std::strtoul(end + 1, nullptr, 10);
    if (last > held.size()) fail(name + " is cut short");
    found.bytes.assign(held.begin() + first, held.begin() + last);
    return found;
  }
};

// The bits of a floating-point number, with those of negative ones mirrored, count up as the numbers do.
static double counted(float number) {
  int32_t bits;
  std::memcpy(&bits, &number, 4);
  return bits < 0 ? -2147483648.0 - bits : bits;
}

// How far one output is off, as a share of its largest number.
static double compare(const std::string& name, const Vectors::Numbers& expected, const executorch::aten::Tensor& found,
                      const std::vector<std::string>& classes) {
  std::vector<executorch::aten::SizesType> shape(found.sizes().begin(), found.sizes().end());
  if (found.scalar_type() != expected.type || shape != expected.shape) fail(name + " has another shape or dtype");
  const float* one = reinterpret_cast<const float*>(expected.bytes.data());
  const float* other = static_cast<const float*>(found.const_data_ptr());
  bool real = expected.type == ScalarType::Float;
  for (int row = 0; real && shape.size() == 2 && size_t(shape[1]) == classes.size() && row < shape[0]; ++row) {
    int best = 0;
    for (int column = 1; column < shape[1]; ++column) best = other[row * shape[1] + column] > other[row * shape[1] + best] ? column : best;
    std::printf("sample %d: %s\n", row, classes[best].c_str());
  }
  if (std::memcmp(one, other, expected.bytes.size()) == 0) return std::printf("%s the same bits\n", name.c_str()), 0.0;
  if (!real) fail(name + " has other numbers, which are no floating-point ones");
  double error = 0, largest = 0, ulps = 0;
  for (size_t at = 0; at < expected.bytes.size() / 4; ++at) {
    if (std::isfinite(one[at]) != std::isfinite(other[at])) error = INFINITY;
    else if (std::isfinite(one[at])) error = std::fmax(error, std::fabs(double(one[at]) - other[at])), largest = std::fmax(largest, std::fabs(one[at]));
    ulps = std::fmax(ulps, std::fabs(counted(one[at]) - counted(other[at])));
  }
  double relative = error / (largest > 0 ? largest : 1);
  std::printf("%s differs by %.2g of its largest number (%.0f ulps)\n", name.c_str(), relative, ulps);
  return relative;
}

int main(int count, char** arguments) {
  if (count != 2) fail("usage: verify FOLDER");
  const std::string folder = arguments[1];
  const Vectors vectors(folder + "/vectors.safetensors");
  executorch::runtime::runtime_init();
  auto loader = executorch::extension::FileDataLoader::from((folder + "/model.portable.pte").c_str());
  if (!loader.ok()) fail(folder + "/model.portable.pte cannot be read");
  auto program = executorch::runtime::Program::load(&loader.get());
  if (!program.ok()) fail(folder + "/model.portable.pte is not a program of ExecuTorch");
  auto about = program->method_meta("forward");
  if (!about.ok()) fail("the program has no forward");

  std::vector<std::vector<uint8_t>> planned(about->num_memory_planned_buffers());  // where tensors lie, as the exporter planned it
  std::vector<executorch::runtime::Span<uint8_t>> spans;
  for (size_t number = 0; number < planned.size(); ++number) {
    planned[number].resize(about->memory_planned_buffer_size(number).get());
    spans.push_back({planned[number].data(), planned[number].size()});
  }
  executorch::runtime::HierarchicalAllocator tensors({spans.data(), spans.size()});
  std::vector<uint8_t> own(1 << 24), passing(1 << 26);
  executorch::runtime::MemoryAllocator method_memory(own.size(), own.data()), passing_memory(passing.size(), passing.data());
  executorch::runtime::MemoryManager memory(&method_memory, &tensors, &passing_memory);
  auto method = program->load_method("forward", &memory);
  if (method.error() == Error::OperatorMissing) fail("this program lacks an operator of the model: build it for this export");
  if (!method.ok()) fail("forward cannot be loaded: error " + std::to_string(int(method.error())));

  std::vector<Vectors::Numbers> given;
  for (const std::string& name : vectors.names("inputs")) given.push_back(vectors.tensor("input/" + name));
  for (size_t number = 0; number < given.size(); ++number) {
    auto& [type, shape, bytes] = given[number];
    std::vector<executorch::aten::DimOrderType> order(shape.size());
    std::vector<executorch::aten::StridesType> strides(shape.size(), 1);
    for (size_t axis = 0; axis < shape.size(); ++axis) order[axis] = axis;
    for (size_t axis = shape.size(); axis-- > 1;) strides[axis - 1] = strides[axis] * shape[axis];
    executorch::aten::TensorImpl tensor(type, shape.size(), shape.data(), bytes.data(), order.data(), strides.data());
    Error error = method->set_input(EValue(executorch::aten::Tensor(&tensor)), number);
    if (error != Error::Ok) fail("input " + std::to_string(number) + " is not taken: error " + std::to_string(int(error)));
  }
  if (Error error = method->execute(); error != Error::Ok) fail("forward failed: error " + std::to_string(int(error)));

  const double tolerance = std::strtod(vectors.between("\"tolerance\":\"", "\"").c_str(), nullptr);
  const std::vector<std::string> names = vectors.names("outputs"), classes = vectors.names("classes");
  bool sound = method->outputs_size() == names.size();
  for (size_t number = 0; number < names.size() && number < method->outputs_size(); ++number) {
    sound &= compare(names[number], vectors.tensor("output/" + names[number]), method->get_output(number).toTensor(), classes) <= tolerance;
  }
  return sound ? 0 : 1;
}
