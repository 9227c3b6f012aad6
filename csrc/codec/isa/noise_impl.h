// Noise, and stochastic rounding of single elements; see elements_impl.h.
#pragma once

#include "codec/isa/elements_impl.h"

namespace fusedcomm {
namespace {

// ---- Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011
//
// A round turns four words w, with the round's key k, into:
//   w0, w1 ← high(w2·B) ^ w1 ^ k0, low(w2·B)
//   w2, w3 ← high(w0·A) ^ w3 ^ k1, low(w0·A)

constexpr int kNumRounds = 10;
constexpr uint32_t kMultiplierA = 0xD2511F53u, kMultiplierB = 0xCD9E8D57u;
// A counter gives 128 bits and an element takes 16.
constexpr int64_t kNoisePerCounter = 8;

// The part of the rounds that is the same for all counters. Counters differ in w0 only, so this is half of the first
// two rounds.
struct NoiseRounds {
  explicit NoiseRounds(const NoiseKey& key) : source(key.source) {
    for (uint32_t i = 0; i < kNumRounds; ++i) {
      keys[i][0] = static_cast<uint32_t>(key.seed) + i * 0x9E3779B9u;
      keys[i][1] = static_cast<uint32_t>(key.seed >> 32) + i * 0xBB67AE85u;
    }
    uint32_t first_w0;
    Scalar::multiply(key.step, kMultiplierB, first_w0, first_w1);
    first_w0 ^= key.parameter ^ keys[0][0];
    Scalar::multiply(first_w0, kMultiplierA, second_high, second_w3);
  }

  uint32_t keys[kNumRounds][2];
  uint32_t source;
  uint32_t first_w1;     // w1 after the first round
  uint32_t second_high;  // high(w0·A) in the second round
  uint32_t second_w3;    // w3 after the second round
};

// Independent chains of multiplications that run side by side, since within a chain each multiplication waits for the
// one before. Measured: three and five chains are slower than four by a tenth or more.
constexpr int kNumChains = 4;

// Elements for which one pass of the loop below makes noise.
template <class V>
constexpr int64_t kNoisePass = kNumChains * V::kCounters * kNoisePerCounter;

template <class V>
void noise_passes(const NoiseRounds& rounds, uint32_t counter, uint16_t* out, int64_t numel) {
  using W = typename V::W;
  const auto& keys = rounds.keys;
  for (int64_t i = 0; i < numel; i += kNoisePass<V>) {
    W w0[kNumChains], w1[kNumChains], w2[kNumChains], w3[kNumChains];
    for (int k = 0; k < kNumChains; ++k, counter += V::kCounters) {
      W high, low;
      V::multiply(V::counters(counter), kMultiplierA, high, low);
      const W first_w2 = V::xor3(high, V::word(rounds.source), V::word(keys[0][1]));
      w2[k] = V::xor3(low, V::word(rounds.second_high), V::word(keys[1][1]));
      w3[k] = V::word(rounds.second_w3);
      V::multiply(first_w2, kMultiplierB, high, w1[k]);
      w0[k] = V::xor3(high, V::word(rounds.first_w1), V::word(keys[1][0]));
    }
    for (int round = 2; round < kNumRounds; ++round) {
      for (int k = 0; k < kNumChains; ++k) {
        W high_a, low_a, high_b, low_b;
        V::multiply(w0[k], kMultiplierA, high_a, low_a);
        V::multiply(w2[k], kMultiplierB, high_b, low_b);
        w0[k] = V::xor3(high_b, w1[k], V::word(keys[round][0]));
        w2[k] = V::xor3(high_a, w3[k], V::word(keys[round][1]));
        w1[k] = low_b;
        w3[k] = low_a;
      }
    }
    for (int k = 0; k < kNumChains; ++k, out += V::kCounters * kNoisePerCounter) {
      V::store_noise(out, w0[k], w1[k], w2[k], w3[k]);
    }
  }
}

template <class V>
void make_noise(const NoiseKey& key, int64_t first, uint16_t* out, int64_t numel) {
  const NoiseRounds rounds(key);
  const int64_t body = numel - numel % kNoisePass<V>;
  noise_passes<V>(rounds, static_cast<uint32_t>(first / kNoisePerCounter), out, body);
  if (body == numel) return;
  uint16_t last[kNoisePass<V>];
  noise_passes<V>(rounds, static_cast<uint32_t>((first + body) / kNoisePerCounter), last, kNoisePass<V>);
  std::memcpy(out + body, last, static_cast<size_t>(numel - body) * sizeof(*out));
}

// ---- stochastic rounding of single elements

template <class V, class T>
void round_stochastic_span(float* data, const uint16_t* noise, int64_t numel) {
  for (int64_t i = 0; i < numel; i += V::kLanes) V::store(data + i, V::rounded(T(), V::load(data + i), noise + i));
}

template <class V, class T>
void round_stochastic(float* data, const uint16_t* noise, int64_t numel) {
  const int64_t body = numel - numel % V::kLanes;
  round_stochastic_span<V, T>(data, noise, body);
  round_stochastic_span<Scalar, T>(data + body, noise + body, numel - body);
}

}  // namespace
}  // namespace fusedcomm
