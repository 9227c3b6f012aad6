// The CPU codec: gradients ⇄ wire bytes, one pass over memory each way. It does not depend on torch.
//
//   pack    gradient slices → wire bytes      y = x·scale, rounded to the wire dtype
//   reduce  one part from every rank → the encoded mean of that part: fp32 sum in rank order, ·scale, one rounding
//   unpack  wire bytes → gradient slices      x = decoded·scale; several messages are first summed, fp32, in rank order
//
// Every function gives the same bytes as tests/helpers/reference, whatever the instruction set and thread count.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codec/args.h"

namespace fusedcomm {

// Instruction sets that this build supports and this machine can run, slowest first. Always contains "portable".
std::vector<std::string> available_isas();

class Codec {
 public:
  // isa: one of available_isas(), or "auto" for the last of them. num_threads: at least 1, counts the calling thread.
  // Throws std::invalid_argument, naming what was given and what is possible.
  Codec(const std::string& isa, int num_threads);
  ~Codec();
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  // The three stages throw std::invalid_argument if their arguments do not fit the layout. pack returns how many
  // elements of the chunk are not finite after scaling.
  int64_t pack(const PackArgs& args) const;
  void reduce(const ReduceArgs& args) const;
  void unpack(const UnpackArgs& args) const;
  // x *= scale, for fp32 gradients that are summed in place. Returns how many elements are not finite after scaling.
  int64_t scale_in_place(const SliceList& list, float scale) const;

  const std::string& isa() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusedcomm
