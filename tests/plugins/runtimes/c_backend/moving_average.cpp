// An example of a model in C++ for backend "c_abi": smooths the rows of SIGNAL, and tags each with a word.
//
//   g++ -shared -fPIC -O2 -I<folder of edge_backend.h> -o libmodel.so moving_average.cpp
//
// SIGNAL FP32 [-1, -1] -> SMOOTH FP32 [-1, -1]: each element is the mean of itself and up to `window` - 1 before it.
// NAME BYTES [-1, 1] -> TAG BYTES [-1, 1]: the name with the parameter `suffix` behind it.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

#include "edge_backend.h"

struct edge_model {
  int64_t window = 1;
  std::string suffix;
};

namespace {

constexpr int64_t kRows[] = {-1, -1};
constexpr int64_t kWords[] = {-1, 1};
constexpr edge_tensor_spec kInputs[] = {{"SIGNAL", EDGE_FP32, 2, kRows}, {"NAME", EDGE_BYTES, 2, kWords}};
constexpr edge_tensor_spec kOutputs[] = {{"SMOOTH", EDGE_FP32, 2, kRows}, {"TAG", EDGE_BYTES, 2, kWords}};

// Nothing may be thrown through the C interface: turns what is thrown into words and a code.
template <typename Action>
int32_t guarded(edge_text* error, Action action) {
  try {
    action();
    return 0;
  } catch (const std::exception& caught) {
    const std::string words = caught.what();
    const size_t length = std::min(words.size(), error->capacity - 1);
    std::memcpy(error->data, words.data(), length);
    error->data[length] = '\0';
    return 1;
  }
}

const edge_tensor& input(const edge_run_args& args, const std::string& name) {
  for (uint32_t i = 0; i < args.input_count; ++i) {
    if (args.inputs[i].name == name) return args.inputs[i];
  }
  throw std::runtime_error("input " + name + " is missing");
}

void* allocate(const edge_run_args& args, const char* name, const edge_tensor& like, uint64_t byte_size) {
  void* memory = args.allocate(args.context, name, like.datatype, like.rank, like.dims, byte_size);
  if (memory == nullptr) throw std::runtime_error(std::string("no memory for ") + name);
  return memory;
}

void smooth(const edge_model& model, const edge_run_args& args) {
  const edge_tensor& signal = input(args, "SIGNAL");
  const auto* given = static_cast<const float*>(signal.data);
  auto* made = static_cast<float*>(allocate(args, "SMOOTH", signal, signal.byte_size));
  const int64_t rows = signal.dims[0], length = signal.dims[1];
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t at = 0; at < length; ++at) {
      const int64_t first = std::max<int64_t>(0, at - model.window + 1);
      float sum = 0;
      for (int64_t i = first; i <= at; ++i) sum += given[row * length + i];
      made[row * length + at] = sum / static_cast<float>(at - first + 1);
    }
  }
}

void tag(const edge_model& model, const edge_run_args& args) {
  const edge_tensor& name = input(args, "NAME");
  const auto* at = static_cast<const char*>(name.data);
  const char* end = at + name.byte_size;
  std::string made;
  while (at < end) {
    uint32_t length;
    std::memcpy(&length, at, sizeof length);
    const std::string word = std::string(at + sizeof length, length) + model.suffix;
    const uint32_t longer = static_cast<uint32_t>(word.size());
    made.append(reinterpret_cast<const char*>(&longer), sizeof longer);
    made += word;
    at += sizeof length + length;
  }
  std::memcpy(allocate(args, "TAG", name, made.size()), made.data(), made.size());
}

}  // namespace

extern "C" uint32_t edge_backend_abi_version(void) { return EDGE_BACKEND_ABI_VERSION; }

extern "C" int32_t edge_model_open(const edge_open_args* args, edge_model** model, edge_text* error) {
  return guarded(error, [&] {
    edge_model opened;
    for (uint32_t i = 0; i < args->parameter_count; ++i) {
      const std::string key = args->parameter_keys[i], value = args->parameter_values[i];
      if (key == "window") opened.window = std::atoll(value.c_str());
      if (key == "suffix") opened.suffix = value;
    }
    if (opened.window < 1) throw std::invalid_argument("parameter window must be a whole number from 1");
    *model = new edge_model(opened);
  });
}

extern "C" int32_t edge_model_describe(edge_model*, const edge_tensor_spec** inputs, uint32_t* input_count,
                                       const edge_tensor_spec** outputs, uint32_t* output_count, edge_text*) {
  *inputs = kInputs;
  *input_count = 2;
  *outputs = kOutputs;
  *output_count = 2;
  return 0;
}

extern "C" int32_t edge_model_run(edge_model* model, const edge_run_args* args, edge_text* error) {
  return guarded(error, [&] {
    for (uint32_t i = 0; i < args->output_count; ++i) {
      if (std::string(args->output_names[i]) == "SMOOTH") smooth(*model, *args);
      if (std::string(args->output_names[i]) == "TAG") tag(*model, *args);
    }
  });
}

extern "C" void edge_model_close(edge_model* model) { delete model; }
