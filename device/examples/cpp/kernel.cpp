// A kernel under test as a program, with nothing but the standard library: a matrix product in f32.
//
//     c++ -O2 -std=c++17 device/examples/cpp/kernel.cpp -o kernel
//     karat verify llama --subject "cmd:./kernel" --sites "prefill.*"
//
// Karat runs it once an op, with a directory as its last argument. `inputs.safetensors` holds the inputs,
// `case.json` the op. The result goes to `y.f32` as raw little-endian f32; exit code 3 says that the op is not
// computed here. Of JSON this reads as much as Karat writes: names, shapes and offsets, without escapes.
//
// Built with -DFORGETS_TAIL it leaves out the last inputs of a width that 16 does not divide.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

struct Tensor {
    std::vector<size_t> shape;
    std::vector<float> values;
};

static std::string read_file(const std::string &path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}

// The whole numbers of the list behind `"key":` that follows position `at`.
static std::vector<size_t> numbers(const std::string &json, const std::string &key, size_t at) {
    std::vector<size_t> list;
    at = json.find('[', json.find("\"" + key + "\"", at));
    for (const char *p = json.c_str() + at + 1; *p != ']';) {
        char *end;
        list.push_back(std::strtoull(p, &end, 10));
        p = *end == ',' ? end + 1 : end;
    }
    return list;
}

// A tensor of a safetensors file; empty where the file has none of that name.
static Tensor tensor(const std::string &file, const std::string &name) {
    uint64_t length;
    std::memcpy(&length, file.data(), 8);
    const std::string header = file.substr(8, length);
    const size_t at = header.find("\"" + name + "\":{");
    if (at == std::string::npos) return {};
    const auto offsets = numbers(header, "data_offsets", at);
    Tensor tensor{numbers(header, "shape", at), std::vector<float>((offsets[1] - offsets[0]) / 4)};
    std::memcpy(tensor.values.data(), file.data() + 8 + length + offsets[0], offsets[1] - offsets[0]);
    return tensor;
}

int main(int argc, char **argv) {
    const std::string directory = argv[argc - 1];
    const std::string json = read_file(directory + "/case.json");
    if (json.find("\"op\": \"linear\"") == std::string::npos) return 3;

    const std::string file = read_file(directory + "/inputs.safetensors");
    const Tensor x = tensor(file, "x"), w = tensor(file, "w"), b = tensor(file, "b");
    if (x.shape.size() != 2 || w.shape.size() != 2) {
        std::cerr << "linear needs x and w with two axes\n";
        return 1;
    }
    const size_t tokens = x.shape[0], inner = x.shape[1], out = w.shape[0];
    size_t used = inner;
#ifdef FORGETS_TAIL
    used = inner / 16 * 16;
#endif
    std::vector<float> y(tokens * out);
    for (size_t t = 0; t < tokens; t++) {
        for (size_t o = 0; o < out; o++) {
            float sum = 0;
            for (size_t i = 0; i < used; i++) sum += x.values[t * inner + i] * w.values[o * inner + i];
            y[t * out + o] = b.values.empty() ? sum : sum + b.values[o];
        }
    }
    std::ofstream(directory + "/y.f32", std::ios::binary)
        .write(reinterpret_cast<const char *>(y.data()), static_cast<std::streamsize>(4 * y.size()));
    return 0;
}
