// What tells device kernels apart, written once: Python makes keys to compile kernels by, the engine to launch them by.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "codec/args.h"
#include "wire/names.h"

namespace fusedcomm {

inline constexpr const char* kPackKernel = "pack";
inline constexpr const char* kReduceKernel = "reduce";
inline constexpr const char* kUnpackKernel = "unpack";
inline constexpr const char* kScaleKernel = "scale";

struct KernelKey {
  std::string kernel;                          // one of the four names above
  Wire wire = Wire::kFp32;                     // what is encoded; unpack: decoded
  int64_t block_numel = kDefaultBlockNumel;    // wires with scales
  GradDtype grad_dtype = GradDtype::kFloat32;  // pack, unpack
  bool flat = true;                            // one run of memory and no exact stream; reduce: no exact section
  bool rotated = false;                        // it rotates; unpack: back; reduce only where it changes the wire
  Wire in_wire = Wire::kFp32;                  // reduce: what is decoded
  bool stochastic = false;                     // pack, reduce
  std::optional<ResidualFormat> feedback;      // pack, reduce: the residual's format if there is one
  bool sums = false;                           // unpack: of several messages

  // Noise and residuals come last: kernels that differ in nothing else are neighbours.
  auto fields() const {
    return std::tie(kernel, wire, block_numel, grad_dtype, flat, rotated, in_wire, sums, stochastic, feedback);
  }
  bool operator<(const KernelKey& other) const { return fields() < other.fields(); }
  bool operator==(const KernelKey& other) const { return fields() == other.fields(); }
};

// The one key of all that differ in what cannot matter to the kernel, as blocks without scales.
inline KernelKey normalised(KernelKey key) {
  if (key.kernel == kScaleKernel) return {key.kernel};
  if (!has_scales(key.wire)) key.block_numel = kDefaultBlockNumel;
  if (key.wire == Wire::kFp32) key.stochastic = false;
  if (key.kernel == kReduceKernel) {
    key.grad_dtype = GradDtype::kFloat32;
  } else {
    key.in_wire = Wire::kFp32;
  }
  return key;
}

inline std::string to_string(const KernelKey& key) {
  constexpr const char* kGradNames[] = {"fp32", "bf16", "fp16"};
  std::string text = key.kernel;
  if (key.kernel == kScaleKernel) return text;
  text += " of " + wire_name(key.wire);
  if (has_scales(key.wire)) text += " in blocks of " + std::to_string(key.block_numel);
  if (key.rotated) text += ", rotated";
  if (key.kernel == kReduceKernel) {
    text += ", from " + wire_name(key.in_wire) + (key.flat ? ", no exact section" : ", with an exact section");
  } else {
    text += std::string(", ") + kGradNames[static_cast<size_t>(key.grad_dtype)] + " gradients, " +
            (key.flat ? "in one run" : "in slices");
  }
  if (key.sums) text += ", of several messages";
  if (key.stochastic) text += ", stochastic";
  if (key.feedback) text += std::string(", feedback in ") + kResidualFormatNames[static_cast<size_t>(*key.feedback)];
  return text;
}

}  // namespace fusedcomm
