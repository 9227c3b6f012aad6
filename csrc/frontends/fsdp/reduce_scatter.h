// Reduce-scatters of FSDP2 in a wire: each rank has a row for every rank, and gets the sum of the rows that are for it.
//
//   input [rank 0's row | rank 1's row | …] ──► pack, a part for each rank ──► all-to-all ──► decode and add in fp32
//     ──► output, in its own dtype
//
// A row consists of a slice of each of the module's parameters that are trained. With error feedback pack keeps a
// residual of all rows, as large as the input.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradients/synchronizer.h"

namespace fusedcomm {

class ReduceScatter {
 public:
  // A parameter's slice in every row.
  struct Piece {
    std::string name;
    int64_t numel = 0;
    int wire = 0;  // number of its wire; see WireConfig
  };

  // index: of the module among those of the synchronizer, the same on every rank. pieces: of all parameters of the
  // module, frozen ones included. The synchronizer knows them by their names, as parameters [world_size, numel].
  ReduceScatter(std::shared_ptr<Synchronizer> synchronizer, size_t index, std::vector<Piece> pieces);

  // From now on the rows consist of these pieces, by index. Call it before the first call, and when no call is under
  // way.
  void set_row(std::vector<size_t> row);
  int64_t row_numel() const { return row_numel_; }
  // Bytes that this rank sends in one call.
  int64_t sent_nbytes() const { return fusedcomm::sent_nbytes(plan_); }
  // Of this rank's residuals; 0 without error feedback.
  int64_t residual_nbytes() const;

  // Writes the sum of the ranks' rows × factor to output, and returns at once. input: [world_size × row_numel()],
  // float32, bfloat16 or float16. output: [row_numel()], of any of these dtypes. Both are contiguous,
  // on the synchronizer's device, and must live until the future is done; on an accelerator, until the work of the
  // stream that has waited for it is. Every rank must make the same calls in the same order.
  // call: the number of earlier ones; it numbers the noise of stochastic rounding.
  // is_last: whether no other module's reduce-scatter follows in the backward pass.
  FuturePtr run(const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call, bool is_last);

 private:
  const std::shared_ptr<Synchronizer> synchronizer_;
  const size_t index_;
  const std::vector<Piece> pieces_;
  // Tensors without memory that stand for the pieces, and those in the row.
  std::vector<at::Tensor> all_, parameters_;
  std::vector<SlicePlace> places_;  // in the row
  int64_t row_numel_ = 0;
  std::string title_;
  BucketPlan plan_;  // of a call with factor 1
};

}  // namespace fusedcomm
