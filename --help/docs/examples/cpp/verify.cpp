// Runs model.aoti.pt2 of an export on its test vectors, and prints what it predicts and how far that is from what the
// model gave where it was exported.
//
//   build/verify FOLDER      exit code: 0 within the export's tolerance, 1 not, 2 it cannot be run

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/types.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>
#include <sstream>

using torch::Tensor;

// A .safetensors file: eight bytes with the length of a header, the header, which is JSON, and the numbers. samewise
// writes the header without spaces, so that a regular expression reads it.
struct Vectors {
  std::string header, numbers;

  explicit Vectors(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(file), {}};
    uint64_t length = 0;
    if (bytes.size() > 8) std::memcpy(&length, bytes.data(), 8);
    if (bytes.size() <= 8 || length > bytes.size() - 8) throw std::runtime_error(path + " cannot be read");
    header = bytes.substr(8, length);
    numbers = bytes.substr(8 + length);
  }

  std::string about(const std::string& key) const {
    std::smatch found;
    if (!std::regex_search(header, found, std::regex("\"" + key + "\":\"((?:[^\"\\\\]|\\\\.)*)\""))) throw std::runtime_error("no " + key);
    return found[1];
  }

  std::vector<std::string> names(const std::string& key) const {  // one a line: in JSON, \n is a backslash and an n
    std::istringstream lines(std::regex_replace(about(key), std::regex(R"(\\n)"), "\n"));
    std::vector<std::string> all;
    for (std::string line; std::getline(lines, line);) all.push_back(line);
    return all;
  }

  Tensor tensor(const std::string& name) const {
    static const std::map<std::string, torch::Dtype> kinds{
        {"F64", torch::kDouble}, {"F32", torch::kFloat}, {"F16", torch::kHalf}, {"BF16", torch::kBFloat16},
        {"I64", torch::kLong},   {"I32", torch::kInt},   {"I16", torch::kShort}, {"I8", torch::kChar},
        {"U8", torch::kByte},    {"BOOL", torch::kBool}};
    const auto at = header.find("\"" + name + "\":{");
    const std::regex form(R"#(\{"dtype":"(\w+)","shape":\[([\d,]*)\],"data_offsets":\[(\d+),(\d+)\]\})#");
    std::smatch found;
    const std::string rest = at == std::string::npos ? "" : header.substr(at);
    if (!std::regex_search(rest, found, form)) throw std::runtime_error("there is no tensor " + name);
    std::vector<int64_t> shape;
    std::istringstream sizes(found[2]);
    for (std::string size; std::getline(sizes, size, ',');) shape.push_back(std::stoll(size));
    Tensor made = torch::empty(shape, kinds.at(found[1]));
    const uint64_t first = std::stoull(found[3]), last = std::stoull(found[4]);
    if (last < first || last > numbers.size() || last - first != made.nbytes()) throw std::runtime_error(name + " is cut short");
    std::memcpy(made.data_ptr(), numbers.data() + first, made.nbytes());
    return made;
  }
};

// How many numbers of the format lie between two, at most: the bits of a number, with those of negative ones mirrored,
// count up as the numbers do.
static int64_t ulps(const Tensor& one, const Tensor& other) {
  if (!one.is_floating_point()) return 0;
  const auto size = one.element_size();
  const auto whole = size == 8 ? torch::kLong : size == 4 ? torch::kInt : torch::kShort;
  const int64_t least = size == 8 ? INT64_MIN : size == 4 ? INT32_MIN : INT16_MIN;
  const auto counted = [&](const Tensor& of) {
    const Tensor bits = of.view(whole).to(torch::kLong);
    return torch::where(bits < 0, least - bits, bits).to(torch::kDouble);
  };
  return (counted(one) - counted(other)).abs().max().item<double>();
}

static double relative(const Tensor& one, const Tensor& other) {  // the largest error over the largest number
  const Tensor a = one.to(torch::kDouble), b = other.to(torch::kDouble);
  if (!torch::equal(a.isfinite(), b.isfinite())) return INFINITY;
  const double largest = a.nan_to_num(0, 0, 0).abs().max().item<double>();
  return (a - b).nan_to_num().abs().max().item<double>() / (largest > 0 ? largest : 1);
}

static std::string grouped(int64_t number) {
  std::string text = std::to_string(number);
  for (int at = static_cast<int>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

static int verify(const std::string& folder) {
  torch::NoGradGuard guard;
  const Vectors vectors(folder + "/vectors.safetensors");
  std::vector<Tensor> inputs;
  for (const auto& name : vectors.names("inputs")) inputs.push_back(vectors.tensor("input/" + name));

  torch::inductor::AOTIModelPackageLoader model(folder + "/model.aoti.pt2");
  const std::vector<Tensor> results = model.run(inputs);

  const auto names = vectors.names("outputs"), classes = vectors.names("classes");
  if (results.size() != names.size()) throw std::runtime_error("gives another number of tensors than the model");
  bool sound = true;
  for (size_t place = 0; place < names.size(); ++place) {
    const Tensor found = results[place].contiguous(), expected = vectors.tensor("output/" + names[place]);
    if (found.sizes() != expected.sizes() || found.dtype() != expected.dtype()) throw std::runtime_error(names[place] + " has another shape or dtype");
    if (found.dim() == 2 && found.size(1) == static_cast<int64_t>(classes.size()))
      for (int64_t sample = 0; sample < found.size(0); ++sample)
        std::printf("sample %ld: %s\n", static_cast<long>(sample), classes[found[sample].argmax().item<int64_t>()].c_str());
    if (std::memcmp(found.data_ptr(), expected.data_ptr(), expected.nbytes()) == 0) {
      std::printf("%s the same bits\n", names[place].c_str());
      continue;
    }
    const double error = relative(expected, found);
    std::printf("%s differs by %.2g of its largest number (%s ulps)\n", names[place].c_str(), error, grouped(ulps(expected, found)).c_str());
    sound = sound && error <= std::stod(vectors.about("tolerance"));
  }
  return sound ? 0 : 1;
}

int main(int count, char** arguments) try {
  if (count != 2) throw std::runtime_error("usage: verify FOLDER");
  return verify(arguments[1]);
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}
