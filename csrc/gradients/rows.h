// The halves of a two-shot, each by itself: sums of which each rank gets a row, and rows of which every rank gets all.
//
//   reduce-scatter: rows [rank 0's | rank 1's | …] ──► pack, a part for each rank ──► all-to-all
//     ──► decode and add in fp32 ──► this rank's row, in its own dtype
//   all-gather: this rank's row ──► pack ──► all-gather ──► decode ──► rows [rank 0's | rank 1's | …]
//
// On two levels a reduce-scatter adds within hosts first, and of an all-gather each row crosses the network once for
// each other host; see sums.cpp. A rank may keep what has crossed it, to gather the same rows again within its host.
//
// A row consists of pieces, for FSDP2 a slice of each of a module's parameters that are trained. Rows have no error
// feedback: residuals would be as large as the rows of all ranks.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gradients/synchronizer.h"

namespace fusedcomm {

class Rows {
 public:
  struct Piece {
    std::string name;
    int64_t numel = 0;
    int wire = 0;  // number of its wire; see WireConfig
  };

  // index: among those of the synchronizer, the same on every rank. pieces: of all parameters, frozen ones included.
  // The synchronizer knows them by their names, as parameters [world_size, numel].
  Rows(std::shared_ptr<Synchronizer> synchronizer, size_t index, std::vector<Piece> pieces);

  // From now on the rows consist of these pieces, by index. Call it before the first call, and when no call is under
  // way.
  void set_row(std::vector<size_t> row);
  int64_t row_numel() const { return row_numel_; }
  // What a call sends: of a reduce-scatter or, if `gathers`, of an all-gather.
  const BucketPlan& plan(bool gathers) const { return gathers ? gather_plan_ : scatter_plan_; }
  // The same of an all-gather with Keeping::kAgain.
  const BucketPlan& plan_of_again() const { return again_plan_; }

  // Each returns at once. rows: [world_size × row_numel()], own: [row_numel()], each float32, bfloat16 or float16. Both
  // are contiguous, on the synchronizer's device, and must live until the future is done; on an accelerator, until the
  // work of the stream that has waited for it is. Every rank must make the same calls in the same order.
  // is_last: whether no others' call follows in the step.

  // Writes the sum of the ranks' rows for this rank × factor to own.
  FuturePtr reduce_scatter(const at::Tensor& rows, const at::Tensor& own, double factor, bool is_last);
  // Writes every rank's own row, as its encoder has rounded it, to rows. On one level nothing is kept. kAgain: writes
  // what the last call with kKeeps has written, and needs no `own` but for its size.
  FuturePtr all_gather(const at::Tensor& rows, const at::Tensor& own, bool is_last,
                       Keeping keeping = Keeping::kNothing);

 private:
  FuturePtr run(const at::Tensor& rows, OfRows kind, bool is_last);

  const std::shared_ptr<Synchronizer> synchronizer_;
  const size_t index_;
  const std::vector<Piece> pieces_;
  // Tensors without memory that stand for the pieces, and those in the row.
  std::vector<at::Tensor> all_, parameters_;
  std::vector<SlicePlace> places_;  // in the row
  int64_t row_numel_ = 0;
  std::string title_;
  BucketPlan scatter_plan_, gather_plan_, again_plan_;  // with factor 1
  std::shared_ptr<KeptMessages> kept_;                  // of all-gathers; null before the first that keeps
};

}  // namespace fusedcomm
