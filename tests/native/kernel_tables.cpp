// Every table of kernels that this machine can run gives the bytes of the portable one; for
// tests/codec/test_kernel_tables.py. Prints a line for each other table: its name and how many outputs were compared.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "codec/isa/scalar_impl.h"
#include "codec/kernel_table.h"
#include "require.h"

namespace fusedcomm {
namespace {

constexpr int64_t kNumel = 4096 + 32;
constexpr int kNumSrcs = 6;
const char* const kFormats[] = {"fp32", "bf16", "fp16"};

// Zeros at first. Begins where an output may be streamed past the caches.
class Bytes {
 public:
  explicit Bytes(size_t nbytes = 0) : lines_((nbytes + sizeof(Line) - 1) / sizeof(Line)), nbytes_(nbytes) {}
  size_t size() const { return nbytes_; }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(lines_.data()); }
  const uint8_t* data() const { return reinterpret_cast<const uint8_t*>(lines_.data()); }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::vector<Line> lines_;
  size_t nbytes_;
};

// Elements of every kind: ordinary ones; blocks of zeros, of -0, of one value, of denormals and of the greatest finite
// values; magnitudes of the whole range; bits at random, so with Inf and NaN, in the last part only.
std::vector<float> inputs(std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(kNumel);
  for (float& value : values) value = normal(random);
  const auto fill = [&](int64_t block, const std::function<float(float)>& change) {
    for (int64_t i = 32 * block; i < 32 * (block + 1); ++i) values[i] = change(values[i]);
  };
  fill(0, [](float) { return 0.0F; });
  fill(1, [](float) { return -0.0F; });
  fill(2, [](float) { return -1.7F; });
  fill(3, [](float value) { return value * 1e-40F; });
  fill(4, [](float value) { return value < 0.5F ? 0.0F : value; });
  // The greatest values. A sum adds them to each other, see compare_decoding.
  fill(5, [](float) { return -3.4028235e38F; });
  fill(7, [](float) { return 3.4028235e38F; });
  // Products and quotients that lie in the middle between two codes.
  fill(6, [&](float) { return static_cast<float>(static_cast<int>(random() % 513) - 256) / 16.0F; });
  for (int64_t i = 8 * 32; i < 40 * 32; ++i) values[i] = std::ldexp(values[i], static_cast<int>(random() % 300) - 150);
  for (int64_t i = 120 * 32; i < kNumel; ++i) {
    if (random() % 16 == 0) values[i] = float_of(static_cast<uint32_t>(random()));
  }
  return values;
}

size_t nbytes_of(int format) { return kNumel * static_cast<size_t>(format_nbytes(static_cast<Format>(format))); }

struct Inputs {
  Bytes elements[kNumFormats];  // the same values in every format
};

Inputs make_inputs(uint32_t seed) {
  std::mt19937 random(seed);
  Inputs in;
  const std::vector<float> values = inputs(random);
  const KernelTable& portable = *portable_kernels();
  for (int format = 0; format < kNumFormats; ++format) {
    in.elements[format] = Bytes(nbytes_of(format));
    if (format == 0) {
      std::memcpy(in.elements[0].data(), values.data(), in.elements[0].size());
    } else {
      portable.convert[0][format](values.data(), in.elements[format].data(), kNumel, 1.0F, false);
    }
  }
  return in;
}

// Makes all NaNs the same. Sums leave it open which NaN they give: compilers may swap the summands.
void make_nans_alike(float* values, int64_t numel) {
  for (int64_t i = 0; i < numel; ++i) values[i] = Scalar::canonical(values[i]);
}

// What a kernel of a table writes. `run` gets the table and a zeroed output.
using Run = std::function<void(const KernelTable&, Bytes&)>;

class Comparison {
 public:
  explicit Comparison(const KernelTable& table) : table_(table) {}

  // Returns the output.
  Bytes operator()(const std::string& name, size_t nbytes, const Run& run) {
    Bytes found(nbytes), expected(nbytes);
    run(table_, found);
    run(*portable_kernels(), expected);
    for (size_t i = 0; i < nbytes; ++i) {
      REQUIRE(found.data()[i] == expected.data()[i], "%s, %s: byte %zu is %02x instead of %02x", table_.isa,
              name.c_str(), i, found.data()[i], expected.data()[i]);
    }
    ++num_compared_;
    return found;
  }

  int num_compared() const { return num_compared_; }

 private:
  const KernelTable& table_;
  int num_compared_ = 0;
};

// Puts a count at the end, so that it is compared as well.
void put_count(Bytes& out, int64_t count) {
  std::memcpy(out.data() + out.size() - sizeof(count), &count, sizeof(count));
}

void compare_elements(Comparison& compare, const Inputs& in, int64_t numel) {
  compare("scale", nbytes_of(0) + 8, [&](const KernelTable& table, Bytes& out) {
    std::memcpy(out.data(), in.elements[0].data(), nbytes_of(0));
    put_count(out, table.scale(reinterpret_cast<float*>(out.data()), numel, 0.3F));
  });
  for (int from = 0; from < kNumFormats; ++from) {
    const void* src = in.elements[from].data();
    for (int to = 0; to < kNumFormats; ++to) {
      for (const bool streamed : {false, true}) {
        compare(std::string("convert ") + kFormats[from] + " " + kFormats[to], nbytes_of(to) + 8,
                [&](const KernelTable& table, Bytes& out) {
                  put_count(out, table.convert[from][to](src, out.data(), numel, 0.3F, streamed));
                });
      }
    }
    for (int num_srcs = 1; num_srcs <= kNumSrcs; ++num_srcs) {
      const int64_t stride = 64 * format_nbytes(static_cast<Format>(from));
      compare(std::string("sum ") + kFormats[from], nbytes_of(0), [&](const KernelTable& table, Bytes& out) {
        table.sum[from](src, stride, num_srcs, reinterpret_cast<float*>(out.data()), numel - 64 * num_srcs);
        make_nans_alike(reinterpret_cast<float*>(out.data()), kNumel);
      });
    }
  }
}

void compare_tiles(Comparison& compare, const Inputs& in) {
  const auto* values = reinterpret_cast<const float*>(in.elements[0].data());
  for (int format = 0; format < 2; ++format) {
    compare(std::string("add ") + kFormats[format], nbytes_of(0), [&](const KernelTable& table, Bytes& out) {
      std::memcpy(out.data(), values + 64, nbytes_of(0) - 256);
      table.add[format](reinterpret_cast<float*>(out.data()), in.elements[format].data(), kNumel - 64);
    });
    compare(std::string("subtract ") + kFormats[format], nbytes_of(0), [&](const KernelTable& table, Bytes& out) {
      table.subtract[format](values, values + 40, out.data(), kNumel - 40);
    });
  }
}

struct Shape {
  Wire wire;
  int64_t block_numel;
  int64_t num_blocks() const { return kNumel / block_numel; }
  size_t scales_nbytes() const {
    return static_cast<size_t>(round_up(fusedcomm::scales_nbytes(wire, num_blocks()), 64));
  }
  size_t nbytes() const { return scales_nbytes() + static_cast<size_t>(codes_nbytes(wire, kNumel)) + 8; }
};

// Sources of sums overlap, so codes meet scales of other blocks.
void compare_decoding(Comparison& compare, const Shape& shape, const std::string& name, const Bytes& message) {
  constexpr int64_t kStrideNbytes = 4;
  const int code = scaled_index(shape.wire);
  const uint8_t* codes = message.data() + shape.scales_nbytes();
  for (int format = 0; format < kNumFormats; ++format) {
    for (const bool streamed : {false, true}) {
      for (const bool rotated : {false, true}) {
        compare(name + (rotated ? " decoded and rotated " : " decoded ") + kFormats[format], nbytes_of(format),
                [&](const KernelTable& table, Bytes& out) {
                  const BlockKernels& kernels = table.blocks[code];
                  const auto decode = (rotated ? kernels.dequantize_rotated : kernels.dequantize)[format];
                  decode(message.data(), codes, out.data(), shape.num_blocks(), shape.block_numel, 0.37F, streamed);
                });
      }
    }
  }
  const int64_t num_blocks = shape.num_blocks() > 2 * kNumSrcs ? shape.num_blocks() - 2 * kNumSrcs : 1;
  for (int num_srcs = 1; num_srcs <= kNumSrcs; ++num_srcs) {
    compare(name + " summed", nbytes_of(0), [&](const KernelTable& table, Bytes& out) {
      table.blocks[code].sum(message.data(), codes, num_blocks > 1 ? kStrideNbytes : 0, num_srcs,
                             reinterpret_cast<float*>(out.data()), num_blocks, shape.block_numel);
      make_nans_alike(reinterpret_cast<float*>(out.data()), kNumel);
    });
  }
}

void compare_blocks(Comparison& compare, const Inputs& in, const Shape& shape) {
  const int code = scaled_index(shape.wire);
  const std::string name = std::string(row_of(shape.wire).name) + ", blocks of " + std::to_string(shape.block_numel);
  for (const bool rotated : {false, true}) {
    for (int format = 0; format < kNumFormats; ++format) {
      for (const bool streamed : {false, true}) {
        const Bytes message =
            compare(name + (rotated ? ", rotated, " : ", ") + kFormats[format], shape.nbytes(),
                    [&](const KernelTable& table, Bytes& out) {
                      const BlockKernels& kernels = table.blocks[code];
                      const auto encode = (rotated ? kernels.quantize_rotated : kernels.quantize)[format];
                      put_count(out, encode(in.elements[format].data(), out.data(), out.data() + shape.scales_nbytes(),
                                            shape.num_blocks(), shape.block_numel, streamed ? 1.0F : 0.3F, streamed));
                    });
        if (format == 0 && streamed) compare_decoding(compare, shape, name, message);
      }
    }
  }
}

int compare_all(const KernelTable& table, uint32_t num_seeds) {
  Comparison compare(table);
  for (uint32_t seed = 0; seed < num_seeds; ++seed) {
    const Inputs in = make_inputs(seed);
    for (const int64_t numel : {kNumel, kNumel - 13}) compare_elements(compare, in, numel);
    compare_tiles(compare, in);
    for (const WireRow& row : kWires) {
      if (!has_scales(row.wire)) continue;
      for (const int64_t block_numel : {32, 64, 256, 4096}) compare_blocks(compare, in, {row.wire, block_numel});
    }
  }
  return compare.num_compared();
}

}  // namespace
}  // namespace fusedcomm

int main(int argc, char** argv) {
  const auto num_seeds = static_cast<uint32_t>(argc > 1 ? std::stoi(argv[1]) : 1);
  using namespace fusedcomm;
  for (const KernelTable* table : {neon_kernels(), avx2_kernels(), avx512_kernels()}) {
    if (table != nullptr) std::printf("%s %d\n", table->isa, compare_all(*table, num_seeds));
  }
}
