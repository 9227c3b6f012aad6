// A bucket of gradients from any front end: its parameters, where each of their gradients lies in memory, and whether
// every rank gets the sum (all-reduce), each rank its row of it (reduce-scatter), or every rank all rows (all-gather).
#pragma once

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "devices/slice_table.h"

namespace fusedcomm {

// The memory of a bucket's gradients: one contiguous run that holds them all, or a tensor for each. A job keeps it
// until the job ends.
class Gradients {
 public:
  // One run. flat: [sum of the numels], or a sparse tensor of one parameter. places: those of the gradients in the run,
  // one after another; a complex element counts twice. num_rows: if the run is rows, one after another: their number.
  // places are those in a row.
  Gradients(at::Tensor flat, std::vector<SlicePlace> places, int64_t num_rows = 1);
  // A tensor for each gradient: dense, with its dimensions in any order, all of one dtype and on one device. A complex
  // gradient counts as twice as many real elements. Throws ValueError, whose text names the gradient that does not fit.
  explicit Gradients(std::vector<at::Tensor> apart);

  bool in_one_run() const { return in_one_run_; }
  bool is_sparse() const { return tensors_.front().is_sparse(); }
  at::ScalarType dtype() const { return tensors_.front().scalar_type(); }
  c10::Device device() const { return tensors_.front().device(); }
  size_t size() const { return places_.size(); }
  int64_t num_rows() const { return num_rows_; }
  int64_t numel() const { return numel_; }  // of all gradients, in all rows
  int64_t nbytes() const { return numel_ * static_cast<int64_t>(tensors_.front().element_size()); }

  // The address that offsets count from; null if sparse. For one run it is the run's, for separate tensors a multiple
  // of 16 bytes.
  std::byte* origin() const { return origin_; }
  const std::vector<SlicePlace>& places() const { return places_; }

  // The run, or each gradient. They own the memory.
  at::ArrayRef<at::Tensor> tensors() const { return tensors_; }
  // The run, or the first of separate tensors. It represents the bucket where one tensor is needed.
  const at::Tensor& front() const { return tensors_.front(); }
  // A view of gradient `index`: [numel of the gradient], in the order of its memory. Not of rows.
  at::Tensor view(size_t index) const;
  // [numel()]: the run itself, or a copy of the separate tensors one after another.
  at::Tensor flattened() const;
  // Makes every gradient zero, whatever it was.
  void zero() const;
  // Writes `flat` [numel()] back to where the gradients lie.
  void assign(const at::Tensor& flat) const;

 private:
  c10::SmallVector<at::Tensor, 1> tensors_;
  const bool in_one_run_;
  std::byte* origin_ = nullptr;
  std::vector<SlicePlace> places_;
  int64_t num_rows_ = 1, numel_ = 0;
};

using GradientsPtr = std::shared_ptr<const Gradients>;

struct BucketRecord;
struct KeptMessages;

// A bucket of a backward pass: every rank gets the mean × factor.
struct OfPass {
  // Called when the bucket is new or has other parameters than before. Throws if the front end finds that these are not
  // the gradients of its parameters. May be empty.
  std::function<void()> check;
  // Whether it holds zeros, in place of those of a rank that has no backward pass, as under Join.
  bool is_shadow = false;
  // Whether the caller keeps the gradients until its stream waits for the future, or calls will_use() instead. If not,
  // they are given to the allocator's care here, which costs it an event of each stream for each gradient.
  bool is_kept = false;
  // The record that has the bucket's codes, if it was packed before, perhaps for another number of ranks; else null.
  std::shared_ptr<const BucketRecord> packed;
  double factor = 1;
};

// A sum by itself: every rank gets the mean × factor; see plan_bucket().
struct NamedSum {
  double factor = 1;
};

// Rows, one for each rank. Reduce-scatter: the rows are read, and `own` gets the sum of the ranks' rows × factor; see
// plan_reduce_scatter(). All-gather: `own` is read, and the rows get those of all ranks.
struct OfRows {
  at::Tensor own;  // this rank's row: contiguous, [elements of a row], of any dtype that gradients may have
  bool gathers = false;
  double factor = 1;
  // All-gathers on two levels: what keeps the codes that this rank receives of other hosts; null: they are not kept.
  std::shared_ptr<KeptMessages> kept;
  bool is_again = false;  // whether it gathers, within hosts, what `kept` has
};

struct Bucket {
  using Kind = std::variant<OfPass, NamedSum, OfRows>;

  // Throws ValueError if there are more or fewer gradients than parameters.
  Bucket(size_t index_of_bucket, bool is_last_one, std::vector<at::Tensor> parameters_in_order, GradientsPtr where,
         Kind what = OfPass{});

  size_t index;  // in the backward pass, or among sums or rows, where indices have no order; the same on every rank
  bool is_last;  // whether it ends the backward pass, or for sums and rows a step of the statistics
  std::vector<at::Tensor> parameters;
  GradientsPtr gradients;  // of the parameters, in the same order
  Kind kind;

  // Null if it is of another kind.
  const OfPass* of_pass() const { return std::get_if<OfPass>(&kind); }
  const NamedSum* named_sum() const { return std::get_if<NamedSum>(&kind); }
  const OfRows* rows() const { return std::get_if<OfRows>(&kind); }
  bool gathers() const { return rows() && rows()->gathers; }
  bool ends_pass() const { return of_pass() && is_last; }
  bool is_kept() const { return of_pass() && of_pass()->is_kept; }
  // What multiplies the sum or the mean; none for a bucket of a pass whose means are not multiplied.
  std::optional<double> factor() const {
    if (of_pass()) return of_pass()->factor == 1 ? std::nullopt : std::optional<double>(of_pass()->factor);
    return rows() ? rows()->factor : named_sum()->factor;
  }
  // What the bucket's future receives: the run of gradients, of separate tensors the first, or this rank's sum.
  const at::Tensor& result() const { return rows() && !gathers() ? rows()->own : gradients->front(); }
};

}  // namespace fusedcomm
