// Reduce-scatters of FSDP2 in a wire: each rank has a row for every rank, and gets the sum of the rows that are for it.
//
//   input [rank 0's row | rank 1's row | …] ──► pack, a part for each rank ──► all-to-all ──► decode and add in fp32
//     ──► output, in its own dtype
//
// A row consists of a slice of each of the module's parameters. With error feedback pack keeps a residual of all rows,
// as large as the input.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "devices/slice_table.h"
#include "gradients/synchroniser.h"

namespace fusedcomm {

// A parameter's slice in every row.
struct RowPiece {
  std::string name;
  int64_t numel = 0;
  int wire = 0;  // number of its wire; see WireConfig
};

using Row = std::vector<RowPiece>;

class ReduceScatter {
 public:
  // index: of the module among those of the synchroniser, the same on every rank.
  ReduceScatter(std::shared_ptr<Synchroniser> synchroniser, size_t index, Row row);

  int64_t row_numel() const { return row_numel_; }
  // That this rank sends in a call.
  int64_t sent_nbytes() { return fusedcomm::sent_nbytes(*plan_of(1)); }
  // Elements of zeros that must follow the input in its memory.
  int64_t padding_numel() const { return padding_numel_; }
  // Of this rank's residuals; 0 without error feedback.
  int64_t residual_nbytes() const;

  // Error feedback: this rank's residuals by parameter name, fp32 [world_size, numel of its piece], in the unit of the
  // input. Parameters that are sent exactly are missing. Call these two when no call is under way.
  std::map<std::string, at::Tensor> residuals() const;
  // Replaces all residuals; a parameter that is not named has none afterwards. Throws ValueError if a size differs.
  void restore_residuals(const std::map<std::string, at::Tensor>& residuals);

  // Elements of this rank's inputs that were not finite when packed, by parameter name; missing ones have none.
  std::map<std::string, int64_t> nonfinite() const;

  // Writes the sum of the ranks' rows × factor to output, and returns at once. input: [world_size × row_numel()], with
  // zeros behind it, float32, bfloat16 or float16. output: [row_numel()], of any of these dtypes. Both are contiguous,
  // on the synchroniser's device, and must live until the future is done; on an accelerator, until the work of the
  // stream that has waited for it is. Every rank must make the same calls in the same order.
  // call: the number of earlier ones; it numbers the noise of stochastic rounding.
  // is_last: whether no other module's reduce-scatter follows in the backward pass.
  FuturePtr run(const at::Tensor& output, const at::Tensor& input, double factor, uint32_t call, bool is_last);

 private:
  // The slices of one payload, in elements from the begin of the input or the output, and the piece of the row that
  // each belongs to: row_->size() for zeros. `tables`: the device's.
  struct Stream {
    std::vector<SlicePlace> places;
    std::vector<size_t> pieces;
  };
  struct Streams {
    Stream lossy, exact;
    std::shared_ptr<const BucketTables> tables;
  };
  // By piece of the row. Jobs share it, because they may outlive this object.
  struct Counts {
    mutable std::mutex mutex;
    std::vector<int64_t> nonfinite;
  };

  std::shared_ptr<const BucketPlan> plan_of(double factor);
  // What is packed of a payload, the segments of all rows; and what is unpacked, this rank's row.
  Stream packed(size_t payload, bool exact) const;
  Stream unpacked(size_t payload, bool exact) const;
  void add_residuals();
  // The payloads of a call.
  std::vector<Payload> payloads_of(const at::Tensor& output, const at::Tensor& input, uint32_t call) const;
  // Counts what is not finite in a chunk of the input.
  static void count_nonfinite(const Row& row, const at::Tensor& input, const BucketPlan& plan, int64_t chunk,
                              Counts* counts);

  const std::shared_ptr<Synchroniser> synchroniser_;
  const size_t index_;
  const std::shared_ptr<const Row> row_;  // jobs share it
  int64_t row_numel_ = 0, padding_numel_ = 0;
  std::shared_ptr<const BucketLabel> label_;
  double factor_ = 1;                       // of plan_
  std::shared_ptr<const BucketPlan> plan_;  // of the last call
  // One for each payload of any plan_, whose layouts do not depend on the factor.
  std::vector<Streams> packed_, unpacked_;
  // Null if none is kept.
  std::vector<std::shared_ptr<ResidualBuffer>> residuals_;
  const std::shared_ptr<Counts> counts_ = std::make_shared<Counts>();
};

}  // namespace fusedcomm
