// Reduce-scatters of FSDP2 in a wire: each rank has a row for every rank, and gets the sum of the rows that are for it.
//
//   input [rank 0's row | rank 1's row | …] ──► pack, a part for each rank ──► all-to-all ──► decode and add in fp32
//     ──► output, in its own dtype
//
// A row consists of a slice of each of the module's parameters.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradients/synchroniser.h"

namespace fusedcomm {

// A parameter's slice in every row.
struct RowPiece {
  std::string name;
  int64_t numel = 0;
  int wire = 0;  // number of its wire; see WireConfig
};

class ReduceScatter {
 public:
  // index: of the module among those of the synchroniser, the same on every rank. is_last: whether no other module's
  // reduce-scatter follows in a backward pass.
  ReduceScatter(std::shared_ptr<Synchroniser> synchroniser, size_t index, bool is_last, std::vector<RowPiece> row);

  int64_t row_numel() const { return row_numel_; }
  // That this rank sends in a call.
  int64_t sent_nbytes() { return fusedcomm::sent_nbytes(*plan_of(1)); }
  // Elements of zeros that must follow the input in its memory.
  int64_t padding_numel() const { return padding_numel_; }

  // Writes the sum of the ranks' rows × factor to output, and returns at once. input: [world_size × row_numel()], with
  // zeros behind it, float32, bfloat16 or float16. output: [row_numel()], of any of these dtypes. Both are contiguous,
  // and must live until the future is done. Every rank must make the same calls in the same order.
  FuturePtr run(const at::Tensor& output, const at::Tensor& input, double factor);

 private:
  std::shared_ptr<const BucketPlan> plan_of(double factor);
  // The slices of one payload: of the segments of all rows, and of this rank's row.
  SliceList packed(size_t payload, bool exact, const at::Tensor& input, const BucketPlan& plan) const;
  SliceList unpacked(size_t payload, bool exact, const at::Tensor& output, const BucketPlan& plan) const;
  template <typename Use>
  void for_pieces(size_t payload, bool exact, const BucketPlan& plan, const Use& use) const;

  const std::shared_ptr<Synchroniser> synchroniser_;
  const size_t index_;
  const bool is_last_;
  const std::vector<RowPiece> row_;
  int64_t row_numel_ = 0, padding_numel_ = 0;
  std::shared_ptr<const BucketLabel> label_;
  double factor_ = 1;                       // of plan_
  std::shared_ptr<const BucketPlan> plan_;  // of the last call
  uint32_t num_calls_ = 0;                  // numbers the noise
};

}  // namespace fusedcomm
