// A vector type that leaves every code to Scalar encodes and decodes to the bits of Scalar; for
// tests/codec/test_codes_by_scalar.py. Prints the number of compared kernels.
#include <cstdio>
#include <random>
#include <vector>

#include "codec/isa/blocks_impl.h"
#include "require.h"

namespace fusedcomm {
namespace {

// Four lanes, each computed by Scalar. It has no codes of its own.
struct Four {
  struct F {
    float lanes[4];
  };
  using N = uint32_t;
  using M = uint32_t;
  using Codes = CodeList<>;
  static constexpr int kLanes = 4;
  static constexpr int kStreamNbytes = 0;
  static constexpr int kMaxima = 1;

  template <class Function>
  static F each(Function function) {
    F result;
    for (int i = 0; i < kLanes; ++i) result.lanes[i] = function(i);
    return result;
  }

  static F broadcast(float value) { return {{value, value, value, value}}; }
  static F mul(F a, F b) {
    return each([&](int i) { return a.lanes[i] * b.lanes[i]; });
  }
  static F add(F a, F b) {
    return each([&](int i) { return a.lanes[i] + b.lanes[i]; });
  }
  static F sub(F a, F b) {
    return each([&](int i) { return a.lanes[i] - b.lanes[i]; });
  }
  static F canonical(F a) {
    return each([&](int i) { return Scalar::canonical(a.lanes[i]); });
  }
  static void count(N& n, F a) {
    for (float lane : a.lanes) Scalar::count(n, lane);
  }
  static int64_t total(N n) { return n; }
  static void track(M& m, F a) {
    for (float lane : a.lanes) Scalar::track(m, lane);
  }
  static void track_signed(M& m, F a) {
    for (float lane : a.lanes) Scalar::track_signed(m, lane);
  }
  static void greatest(const M* m, uint32_t* bits) { Scalar::greatest(m, bits); }
  template <class T>
  static F load(const T* p) {
    return each([&](int i) { return Scalar::load(p + i); });
  }
  template <class T>
  static void store(T* p, F a) {
    for (int i = 0; i < kLanes; ++i) Scalar::store(p + i, a.lanes[i]);
  }
  template <class T>
  static void stream(T* p, F a) {
    store(p, a);
  }
  template <int kDistance>
  static F mix(F a) {
    return each([&](int i) {
      const float other = a.lanes[i ^ kDistance];
      return i & kDistance ? other - a.lanes[i] : a.lanes[i] + other;
    });
  }
};

constexpr int64_t kBlockNumel = 64, kNumBlocks = 9, kNumel = kNumBlocks * kBlockNumel;

struct Encoded {
  std::vector<uint8_t> scales = std::vector<uint8_t>(4 * kNumBlocks), codes = std::vector<uint8_t>(kNumel);
};

struct Kernels {
  QuantizeFn quantize, quantize_rotated;
  QuantizeStochasticFn quantize_stochastic;
  DequantizeFn dequantize;
  SumBlocksFn sum;
};

template <class V, class Code>
Kernels kernels_of() {
  return {quantize<V, Code, float, false>, quantize<V, Code, float, true>, quantize_stochastic<V, Code, false>,
          dequantize<V, Code, float, false>, sum_blocks<V, Code>};
}

// Every kernel of both sets gets the same input. Returns how many were compared.
int compare(const Kernels& one, const Kernels& other, const std::vector<float>& values,
            const std::vector<uint16_t>& noise) {
  int num_compared = 0;
  const auto compare_encoded = [&](auto encode, auto encode_other) {
    Encoded a, b;
    REQUIRE(encode(a) == encode_other(b), "counts of non-finite elements");
    REQUIRE(a.scales == b.scales && a.codes == b.codes, "kernel %d", num_compared);
    ++num_compared;
    return a;
  };
  const auto nearest = [&](QuantizeFn quantize) {
    return [&values, quantize](Encoded& out) {
      return quantize(values.data(), out.scales.data(), out.codes.data(), kNumBlocks, kBlockNumel, 0.3F, true);
    };
  };
  const auto stochastic = [&](QuantizeStochasticFn quantize) {
    return [&, quantize](Encoded& out) {
      return quantize(values.data(), noise.data(), out.scales.data(), out.codes.data(), kNumBlocks, kBlockNumel);
    };
  };
  compare_encoded(nearest(one.quantize_rotated), nearest(other.quantize_rotated));
  compare_encoded(stochastic(one.quantize_stochastic), stochastic(other.quantize_stochastic));
  const Encoded encoded = compare_encoded(nearest(one.quantize), nearest(other.quantize));

  const auto bits = [&](const Kernels& kernels, bool sums) {
    std::vector<float> out(kNumel);
    if (sums) {
      kernels.sum(encoded.scales.data(), encoded.codes.data(), 0, 3, out.data(), kNumBlocks, kBlockNumel);
    } else {
      kernels.dequantize(encoded.scales.data(), encoded.codes.data(), out.data(), kNumBlocks, kBlockNumel, 0.5F, true);
    }
    std::vector<uint32_t> found;
    for (float value : out) found.push_back(bits_of(Scalar::canonical(value)));
    return found;
  };
  for (const bool sums : {false, true}) {
    REQUIRE(bits(one, sums) == bits(other, sums), "sums: %d", sums);
    ++num_compared;
  }
  return num_compared;
}

template <class... Code>
int compare_all(CodeList<Code...>) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(kNumel);
  std::vector<uint16_t> noise(kNumel);
  for (float& value : values) value = normal(random);
  for (uint16_t& word : noise) word = static_cast<uint16_t>(random());
  for (int64_t i = 0; i < kBlockNumel; ++i) values[i] = 0;  // a block of zeros
  values[kBlockNumel + 3] = -float_of(kInfBits),
                       values[kBlockNumel + 5] = float_of(kNanBits);                // one that is not finite
  for (int64_t i = 2 * kBlockNumel; i < 3 * kBlockNumel; ++i) values[i] *= 1e-40F;  // one of denormals
  return (compare(kernels_of<Four, Code>(), kernels_of<Scalar, Code>(), values, noise) + ...);
}

}  // namespace
}  // namespace fusedcomm

int main() { std::printf("%d\n", fusedcomm::compare_all(fusedcomm::AllCodes())); }
