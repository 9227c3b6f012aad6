// The key that identifies a device kernel. Python makes keys to compile kernels, and the engine makes keys to find the
// kernel to launch.
#pragma once

#include <cstdint>
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
  Wire wire = Wire::kFp32;                     // the wire that is encoded; unpack: decoded
  int64_t block_numel = kDefaultBlockNumel;    // for wires with scales
  GradDtype grad_dtype = GradDtype::kFloat32;  // of the gradients that pack reads or unpack writes
  Wire in_wire = Wire::kFp32;                  // reduce: the wire that is decoded
  bool feedback = false;                       // pack, reduce: with a residual
  bool sums = false;                           // unpack: adds several messages

  // `feedback` comes last, so that kernels which differ only in it are neighbors; see CudaKernels::at_any_feedback().
  auto fields() const { return std::tie(kernel, wire, block_numel, grad_dtype, in_wire, sums, feedback); }
  bool operator<(const KernelKey& other) const { return fields() < other.fields(); }
  bool operator==(const KernelKey& other) const { return fields() == other.fields(); }
};

// Resets the fields that do not matter to the kernel, such as block_numel of a wire without scales. Keys of the same
// kernel are then equal.
inline KernelKey normalised(KernelKey key) {
  if (key.kernel == kScaleKernel) return {key.kernel};
  if (!has_scales(key.wire)) key.block_numel = kDefaultBlockNumel;
  if (key.kernel == kReduceKernel) {
    key.grad_dtype = GradDtype::kFloat32;
  } else {
    key.in_wire = Wire::kFp32;
  }
  return key;
}

// Describes the kernel, for messages.
inline std::string to_string(const KernelKey& key) {
  constexpr const char* kGradNames[] = {"fp32", "bf16", "fp16"};
  std::string text = key.kernel;
  if (key.kernel == kScaleKernel) return text;
  text += " of " + wire_name(key.wire);
  if (has_scales(key.wire)) text += " in blocks of " + std::to_string(key.block_numel);
  if (key.kernel == kReduceKernel) {
    text += ", from " + wire_name(key.in_wire);
  } else {
    text += std::string(", ") + kGradNames[static_cast<size_t>(key.grad_dtype)] + " gradients";
  }
  if (key.sums) text += ", of several messages";
  if (key.feedback) text += ", feedback";
  return text;
}

}  // namespace fusedcomm
